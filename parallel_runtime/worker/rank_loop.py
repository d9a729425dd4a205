"""The rank's loop: wait for a message on the own socket, do it, answer. A rank never waits in a
collective while idle.
"""

from __future__ import annotations

import errno
import os
import select
import time
import traceback
from collections import OrderedDict, deque
from typing import Any

import torch
from msgspec.structs import replace

from ..checkpoint import File, check_copy, check_file
from ..comfy_bridge.source import build_from_state, call_factory, find_here
from ..comm.exchange import Stopped
from ..comm.machines import MachineComm
from ..comm.mesh import Mesh
from ..errors import NoRoom, PipeMeshError, Refused
from ..layout import Layout
from ..memory import give_back_freed, system_memory
from ..patches import Part
from ..wire.arena import Board
from ..wire.channel import Channel
from ..wire.messages import PHASE, Adopt, Close, Done, Failed, Fetch, Forget, Forward, Load, Memory, Request, SetWeightPatches
from ..wire.segment import Segment, TensorRef, dtype_name, mib
from ..wire.tree import decode_tree, encode_tree
from .resident import ResidentModel

KEPT_VERSIONS = 64
EMPTY = torch.empty(0)
MEMORY_KEPT_S = 1.0  # asking the system costs as much as the rest of a short evaluation's answer


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text or "out of memory" in text)
    )


def kind_of(error: Exception) -> str:
    """``Failed.kind``."""
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, NoRoom):
        return "room"
    return "refused" if isinstance(error, PipeMeshError) else "error"


class Engine:
    """One rank. ``arena`` is the UI's arena, mapped; on another host, what stands for it there."""

    def __init__(self, channel: Channel, arena: Segment, mesh: Mesh, device: torch.device, hosts: MachineComm | None = None):
        self._channel = channel
        self._arena = arena
        self._board = Board(arena)
        self._mesh = mesh
        self._writes = mesh.rank == Layout(**mesh.degrees).writer
        self._ahead: deque[tuple[Request | Close, list[int]]] = deque()  # messages that were read before their turn
        self._device = device
        self._hosts = hosts
        self._spread: set[int] = set()  # versions that every host has
        self._rank = mesh.rank
        self._models: dict[str, ResidentModel] = {}
        self._versions: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._model = ""  # of the evaluation at hand
        self._output: Any = None
        self._request = 0
        self._memory: Memory | None = None
        self._memory_asked = 0.0

    def wants_stop(self) -> bool:
        return 0 < self._request <= self._board.cancelled_request

    def tick(self) -> None:
        """Something has come further."""
        self._board.tick(self._rank)

    def next_part(self) -> Part | None:
        """Of the next message, if it is here already and for the same model."""
        while not self._ahead and select.select([self._channel], [], [], 0)[0]:
            self._ahead.extend(self._channel.pump())
        message = self._ahead[0][0] if self._ahead else None
        return message.part if isinstance(message, Forward) and message.model == self._model else None

    def reserve(self, nbytes: int) -> None:
        """Raises NoRoom where this rank's device has not so much free."""
        free = self.memory().free
        if nbytes > free:
            raise NoRoom(
                f"Rank {self._rank} needs {mib(nbytes)} for the keys and values of its blocks and {mib(free)} are free: "
                "add ranks, make the image or the batch smaller, or free memory."
            )

    def serve(self) -> None:
        """Until Close, or until the UI is gone (ChannelClosed)."""
        while True:
            self._board.enter(self._rank, "waiting")
            message, fds = self._ahead.popleft() if self._ahead else self._channel.receive()
            if isinstance(message, Close):
                return
            self._board.enter(self._rank, PHASE[type(message)], message.request)
            self._channel.send(self._answer(message, fds))

    def _answer(self, message: Request, fds: list[int]) -> Done | Failed:
        """The worker's top: whatever goes wrong is told to the UI, which decides whether the pool
        can go on.
        """
        self._request = message.request
        try:
            segments = map_segments(fds)
            try:
                with torch.inference_mode():
                    return self._do(message, segments)
            finally:
                for segment in segments:
                    segment.close()
        except Stopped:
            return Done(request=message.request, memory=self.memory(), cancelled=True)
        except Exception as error:  # noqa: BLE001
            kind = kind_of(error)
            if kind == "memory" and self._device.type == "cuda":
                torch.cuda.empty_cache()
            return Failed(
                request=message.request,
                kind=kind,
                phase=PHASE[type(message)],
                text=f"{type(error).__name__}: {error}" if kind == "error" else str(error),
                trace=traceback.format_exc(),
                memory=self.memory(),
                messages_done=self._messages_done(message),
            )

    def _messages_done(self, message: Request) -> str:
        """Which of the messages of a pipeline went through: none, some or all."""
        if not isinstance(message, Forward):
            return "all"
        return self._models[message.model].method.facts.messages_done if message.model in self._models else "none"

    def _do(self, message: Request, segments: list[Segment]) -> Done:
        if isinstance(message, Forward):
            return self._forward(message)
        if isinstance(message, Fetch):
            self._arena.follow(message.arena_bytes)
            return self._write(message.request, self._output, message.out)
        if isinstance(message, Load):
            self._load(message, segments)
        elif isinstance(message, SetWeightPatches):
            self._patch(message, segments)
        elif isinstance(message, Adopt):
            self._models[message.model].adopt()
        elif isinstance(message, Forget):
            self._forget(message.model)
        else:
            self._release(message.model)
        return Done(request=message.request, memory=self.memory())

    def _load(self, message: Load, segments: list[Segment]) -> None:
        if message.model in self._models:
            return
        source = decode_tree(message.source, segments[0].tensor if segments else _no_tensors)
        if "factory" in source:
            patcher = call_factory(source["factory"], self._checked(source["args"], source["file"]), source["index"])
        else:
            patcher = build_from_state(source)
        self._models[message.model] = ResidentModel(patcher, self._device, self._mesh, self, message.stages)

    def _checked(self, args: tuple, file: File | None) -> tuple:
        """The factory's arguments, with the checkpoint as this host has it. Raises Refused if it is
        not the one the UI loaded.
        """
        if file is None or self._hosts is None or not self._hosts.away:
            check_file(file)
            return args
        here = find_here(file[0])
        check_copy(here, file[1])
        return tuple(here if arg == file[0] else arg for arg in args)

    def _patch(self, message: SetWeightPatches, segments: list[Segment]) -> None:
        model = self._models[message.model]
        payload = decode_tree(message.payload, segments[0].tensor)
        place = segments[1] if message.shared is not None else None
        model.patch(message.patches_id, payload["patches"], payload["objects"], message.shared, place)

    def _release(self, name: str) -> None:
        model = self._models.pop(name, None)
        if model is not None:
            model.method.detach()
        del model
        self._versions.clear()
        self._give_back()

    def _forget(self, name: str) -> None:
        if name in self._models:
            self._models[name].method.end_run()
            self._give_back()

    def _give_back(self) -> None:
        """What is free in this process becomes free for others: on its GPU the UI decodes images,
        and text encoders wait.
        """
        give_back_freed()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, message: Forward) -> Done:
        model = self._models[message.model]
        self._model = message.model
        model.method.begin(message.part or Part(0, 0))
        self._arena.follow(message.arena_bytes)
        if model.patches_id != message.patches_id:
            raise Refused(f"Rank {self._rank} holds weight patches {model.patches_id!r}, the run wants {message.patches_id!r}: run again.")
        began = time.perf_counter()
        if self._hosts is not None:
            self._receive(message.arguments)
        output = model.evaluate(decode_tree(message.arguments, self._input), message.request)
        if not self._writes:
            output = None
        done = self._write(message.request, output, message.out)
        return replace(
            done,
            began_s=began,
            compute_s=time.perf_counter() - began,
            exchange_s=self._mesh.seconds,
            sent_bytes=self._mesh.sent_bytes,
            block_s=dict(model.method.facts.block_s),
        )

    def _receive(self, arguments: bytes) -> None:
        """Brings to every host's arena what this evaluation names and the host has not; what has a
        version goes once.
        """
        new: dict[int, TensorRef] = {}

        def note(ref: TensorRef) -> torch.Tensor:
            if ref.nbytes and not (ref.version and ref.version in self._spread):
                new[ref.offset] = ref
            return EMPTY

        decode_tree(arguments, note)
        self._hosts.spread([self._arena.tensor(TensorRef(ref.offset, (ref.nbytes,), "uint8")) for ref in new.values()])
        self._spread.update(ref.version for ref in new.values() if ref.version)

    def _input(self, ref: TensorRef) -> torch.Tensor:
        """Conditioning is moved to the device once; what changes with every evaluation is copied,
        so that a model may write to it, but for what is read in place: the method takes the rows it
        needs.
        """
        view = self._arena.tensor(ref)
        if ref.in_place:
            return view
        if not ref.version:
            return view.to(self._device, copy=True)
        if self._device.type == "cpu":
            return view
        if ref.version not in self._versions:
            self._versions[ref.version] = view.to(self._device)
            if len(self._versions) > KEPT_VERSIONS:
                self._versions.popitem(last=False)
        self._versions.move_to_end(ref.version)
        return self._versions[ref.version]

    def _write(self, request: int, output: Any, place: TensorRef) -> Done:
        """Into the arena if it fits; else it is kept for a Fetch."""
        offset = place.offset
        fits = True

        def put(_path: str, tensor: torch.Tensor) -> TensorRef:
            nonlocal offset, fits
            ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype))
            offset += -(-ref.nbytes // 64) * 64
            if offset > place.offset + place.nbytes:
                fits = False
            else:
                self._arena.put(ref.offset, tensor)
            return ref

        tree = encode_tree(output, put)
        self._output = None if fits else output
        needs = 0 if fits else offset - place.offset
        return Done(request=request, memory=self.recent_memory(), output=tree if fits else b"", needs_bytes=needs)

    def recent_memory(self) -> Memory:
        """At most ``MEMORY_KEPT_S`` old."""
        if self._memory is None or time.monotonic() - self._memory_asked > MEMORY_KEPT_S:
            return self.memory()
        return self._memory

    def memory(self) -> Memory:
        self._memory, self._memory_asked = self._ask_memory(), time.monotonic()
        return self._memory

    def _ask_memory(self) -> Memory:
        held = sum(model.nbytes for model in self._models.values())
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return Memory(free + cached, total, held)
        return Memory(*system_memory(), held)


def map_segments(fds: list[int]) -> list[Segment]:
    try:
        return [Segment(fd, os.fstat(fd).st_size) for fd in fds]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _no_tensors(ref: TensorRef) -> torch.Tensor:
    raise Refused("A model source names tensors but carries no segment.")
