"""Carry out a rank's requests: load, patch and release models, compute evaluations, end runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch

from ..attention.kernels import TORCHS, Kernels
from ..checkpoint import File, check_copy, check_file
from ..comm.device_copies import Reached
from ..comm.mesh import Mesh, open_weights
from ..comm.readers import readers_of
from ..comm.traffic import Unlike
from ..crossing.source import build_from_state, build_vae, call_factory, find_here
from ..crossing.upscalers import build_upscaler
from ..errors import Refused
from ..families.plan import COMPILE
from ..layout import ALONE
from ..memory import give_back_freed
from ..methods.method import free_frames
from ..methods.recordings import Recordings
from ..wire.messages import (
    Done,
    DropSets,
    EndRun,
    Forward,
    Load,
    ReadWeights,
    Release,
    Request,
    SetWeightPatches,
)
from ..wire.segment import Segment, TensorRef
from ..wire.tree import decode_tree
from .arena_io import ArenaIO, Written
from .compiling import compilation_noted
from .device_memory import DeviceMemory
from .patched_sets import PatchedSets
from .resident_model import CountingRank, ResidentModel, counted, in_fp32
from .resident_vae import ResidentVAE

MOST_FAILED = 16  # attempts: requests of older ones are answered


class Skipped(Exception):
    """The evaluation belongs to an attempt in which this rank has failed. The rank joins no more
    messages of that attempt: the other ranks could take them for the messages that they wait for.
    """


class Stand(NamedTuple):
    """How far this rank has come in a request's messages; the fields are those of ``Failed``."""

    at: tuple[int, int] | None = (0, 0)
    complete: bool = False


@dataclass(frozen=True)
class Enqueued:
    """The answer to an evaluation that the device still computes: ``answer`` makes the answer once
    ``reached`` is over. ``stand`` is this rank's at that time.
    """

    request: Forward
    reached: Reached
    answer: Callable[[], Done]
    stand: Stand


class RequestHandler:
    """Carries out the requests of one rank, and holds its models. ``machines``: as ``Start`` has
    them; on another machine than ComfyUI's, files have times of their own. ``joining`` is entered
    while the rank joins groups.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        memory: DeviceMemory,
        io: ArenaIO,
        machines: tuple[int, ...] = (),
        kernels: Kernels = TORCHS,
        joining: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.models: dict[str, ResidentModel | ResidentVAE] = {}
        self._mesh = mesh
        self._device = device
        self._memory, self._io = memory, io
        self._machines = machines
        self._joining, self._kernels = joining, kernels
        # Whether this rank has the output, by how many groups compute it together
        self._writes = {width: mesh.layout.joined(width).writes(mesh.rank) for width in mesh.layout.widths}
        self._writes[ALONE] = True
        # Run and attempt, where this rank left others waiting
        self._failed: deque[tuple[int, int]] = deque(maxlen=MOST_FAILED)
        memory.kept_bytes = lambda: kept_bytes(self.models.values(), mesh)
        memory.graph_bytes = lambda: sum(one.pool_bytes for one in recordings_of(self.models.values()))
        memory.set_bytes = lambda on_device: sum(one.nbytes(on_device) for one in sets_of(self.models))

    def handle(self, request: Request, segments: list[Segment], rank: CountingRank) -> Done | Enqueued:
        """Carries out ``request`` and returns the answer. ``segments``: those that the request
        carried, in its order. Errors of every kind pass through: the loop answers with them.

        On a GPU an evaluation is only enqueued, so that the next one can be while it computes.
        """
        match request:
            case Forward():
                return self._forward(request, rank)
            case Load():
                self._load(request, segments, rank)
                model = self.models.get(request.model)
                unread = isinstance(model, ResidentModel) and model.weights.unread_bytes > 0
                return Done(request=request.request, memory=self._memory.now(), unread=unread)
            case ReadWeights():
                self._read_weights(request, rank)
            case SetWeightPatches():
                return self._set_weight_patches(request, segments, rank)
            case DropSets():
                drop_kept(self.models, request.is_short)
                self._memory.give_back()
            case EndRun():
                return self._end_run(request)
            case Release():
                self._release(request.model)
        return Done(request=request.request, memory=self._memory.now())

    def stand(self, request: Request) -> Stand:
        """Returns how far this rank has come in the messages of the request at hand."""
        traffic = self._mesh.sequence.traffic
        return Stand(traffic.place, traffic.is_complete) if isinstance(request, Forward) else Stand()

    def _load(self, request: Load, segments: list[Segment], rank: CountingRank) -> None:
        if request.model in self.models:
            return
        self._mesh.sequence.use(1)  # weights are kept by group
        if request.weights == "sharded":
            with self._joining():
                open_weights(self._mesh)
        source = decode_tree(request.source, segments[0].tensor if segments else no_tensors)
        if "vae" in source or "upscaler" in source:
            model = (build_vae if "vae" in source else build_upscaler)(source, self._device)
            self.models[request.model] = ResidentVAE(model, self._device, self._mesh, rank, "vae" in source)
            self._count_models()
            return
        if "factory" in source:
            args = self._checked(source["args"], source["file"], source["ends"])
            if request.checks:
                return
            patcher = call_factory(source["factory"], args, source["index"], source["dtypes"])
        else:
            patcher = build_from_state(source)
        readers = None if len({*self._machines}) > 1 else readers_of(self._mesh)
        free_bytes = partial(self._memory.free_on, ranks=self._mesh.layout.world_size)
        self.models[request.model] = ResidentModel(
            patcher, self._device, self._mesh, rank, request, self._kernels, readers, free_bytes
        )
        self._count_models()
        self._memory.give_back()  # whole layers that were loaded or patched for the sake of a part

    def _read_weights(self, request: ReadWeights, rank: CountingRank) -> None:
        """Reads the weights. If any rank fails, no rank keeps the model, because it lacks some
        weights.
        """
        try:
            weights = self._transformer(request.model).weights
            weights.read(counted(rank, weights.unread_bytes))
        except BaseException:
            self._release(request.model)
            raise

    def _checked(self, args: tuple, file: File | None, ends: bytes) -> tuple:
        """Returns the factory's arguments, with the checkpoint's path on this machine. Raises
        Refused if it is not the file that the UI loaded.
        """
        if file is None or not (self._machines and self._machines[self._mesh.rank]):
            check_file(file)
            return args
        here = find_here(file[0])
        check_copy(here, file, ends)
        return tuple(here if arg == file[0] else arg for arg in args)

    def _set_weight_patches(
        self, request: SetWeightPatches, segments: list[Segment], rank: CountingRank
    ) -> Done:
        payload, model = decode_tree(request.payload, segments[0].tensor), self._transformer(request.model)
        patches, objects = payload.get("patches"), payload.get("objects")
        is_there = model.patch(request.patches_id, patches, objects, rank, request.comes_back)
        self._memory.give_back()  # whole layers that were patched for the sake of a part
        return Done(request=request.request, memory=self._memory.now(), lacks=not is_there)

    def _transformer(self, name: str) -> ResidentModel:
        """A transformer: VAEs have no weight patches."""
        return cast("ResidentModel", self.models[name])

    def _release(self, name: str) -> None:
        try:
            if name in self.models:
                self.models.pop(name).detach()
        finally:
            self._count_models()
            self._forget_conditioning()
            self._memory.give_back()

    def _count_models(self) -> None:
        self._memory.model_bytes = sum(model.nbytes for model in self.models.values())

    def _forget_conditioning(self) -> None:
        self._io.conditioning.forget()
        self._memory.conditioning_bytes = 0

    def _end_run(self, request: EndRun) -> Done:
        """Frees the memory that the method kept for the run, and its conditioning. On CPUs, freed
        memory is kept for the next run, except a pipeline's keys and values, which are gigabytes.
        So is what torch caches on a GPU, unless others there need it. Code of nodes runs after the
        cut: if it fails, the arena's owner still shrinks the arena.
        """
        self._forget_conditioning()
        self._io.arena.cut(request.arena_bytes or self._io.arena.nbytes)
        model, recorded = self.models.get(request.model), None
        if isinstance(model, ResidentModel):
            recorded = model.end_run(self._memory.little())
        if model is not None:
            model.method.end_run(self._memory.little())
        needed = self._mesh.rank in request.cleared
        for sets in sets_of(self.models) if needed else ():
            sets.leave_gpu()
        if self._mesh.layout.stages > 1:
            give_back_freed()
        if needed or self._memory.is_tight:
            self._memory.empty_cache()
        return Done(request=request.request, memory=self._memory.now(), recorded=recorded)

    def _forward(self, request: Forward, rank: CountingRank) -> Done | Enqueued:
        """Raises Skipped, and every error of the evaluation: then ``stand`` tells whether other
        ranks may wait for messages of this one.
        """
        traffic, attempt = self._mesh.sequence.traffic, (request.part.run, request.part.attempt)
        traffic.clear()
        if attempt in self._failed:
            raise Skipped("This worker failed in an evaluation that was sent along with this one.")
        try:
            model = self.models[request.model]
            self._mesh.sequence.use(request.width)
            return self._evaluated(model, request, rank)
        except BaseException as error:
            self._io.settle()
            free_frames(error)
            if isinstance(error, Unlike):
                error = error.error
            if isinstance(error, Exception) and not traffic.is_complete:
                self._failed.append(attempt)
            raise error

    def _evaluated(
        self, model: ResidentModel | ResidentVAE, request: Forward, rank: CountingRank
    ) -> Done | Enqueued:
        if model.recordings is not None:
            model.recordings.is_wanted = request.record
        model.method.begin(request.part)
        self._io.arena.follow()
        if model.patches_id != request.patches_id:
            raise Refused(
                f"Rank {self._mesh.rank} holds weight patches {model.patches_id!r}, the run wants"
                f" {request.patches_id!r}: run again."
            )
        began = time.perf_counter()
        try:
            arguments = self._io.read(request.arguments)
        finally:
            kept = model.kept.nbytes if model.kept is not None else 0
            self._memory.conditioning_bytes = self._io.conditioning.nbytes + kept
        compiles = COMPILE in arguments.get("transformer_options", {})
        with compilation_noted(rank) if compiles else nullcontext():
            on_rank = partial(in_fp32, self._transformer(request.model)) if request.in_fp32 else model.on_rank
            output = on_rank(arguments, request.request)
        self._mesh.sequence.traffic.is_complete = True
        idle = None if (own := model.recordings) is None else own.after(rank.trail)
        rank.tick()  # the answer waits until the GPU has computed it
        finish = self._io.write(output, request.out) if self._writes[request.width] else Written
        traffic, block_s = self._mesh.sequence.traffic, model.method.block_s
        waited_s = {axis: spent_s for axis, spent_s in traffic.waited_s.items() if spent_s}
        sent_bytes = traffic.sent_bytes.total()

        def done() -> Done:
            written = finish()
            return Done(
                request=request.request,
                memory=self._memory.recent(),
                output=written.tree,
                wrote=written.wrote,
                apart=written.apart,
                began_s=began,
                compute_s=time.perf_counter() - began,
                waited_s=waited_s,
                sent_bytes=sent_bytes,
                block_s=dict(block_s()),
                idle=idle,
            )

        if self._device.type == "cuda":
            return Enqueued(request, Reached(self._device), done, self.stand(request))
        return done()


def kept_bytes(models: Iterable[ResidentModel | ResidentVAE], mesh: Mesh) -> int:
    """Returns the bytes of the messages' buffers, and of tensors that methods keep for later
    evaluations.
    """
    buffers = sum(buffer.nbytes for buffer in mesh.sequence.buffers)
    recorded = sum(one.nbytes for one in recordings_of(models))
    return buffers + recorded + sum(model.method.kept_bytes for model in models)


def sets_of(models: Mapping[str, ResidentModel | ResidentVAE]) -> list[PatchedSets]:
    return [model.sets for model in models.values() if isinstance(model, ResidentModel)]


def drop_kept(models: Mapping[str, ResidentModel | ResidentVAE], is_short: bool) -> None:
    for sets in sets_of(models):
        sets.drop()
    for recordings in recordings_of(models.values()):
        if is_short:
            recordings.give_up()
        recordings.void()


def recordings_of(models: Iterable[ResidentModel | ResidentVAE]) -> list[Recordings]:
    return [model.recordings for model in models if model.recordings is not None]


def no_tensors(ref: TensorRef) -> torch.Tensor:
    raise Refused("A model source names tensors but carries no segment.")
