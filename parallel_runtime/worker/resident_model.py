"""Hold a model on a rank: its weights, its weight patches, and its parallel method."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from ..attention.kernels import TORCHS, Kernels
from ..comm.mesh import Mesh
from ..comm.readers import Readers
from ..comm.shard_gather import ShardGather
from ..crossing.block_code import clean_up
from ..crossing.kept_tokens import KEPT, KeptTokens, Sharers
from ..crossing.named_code import BACKEND, SETTINGS, options_made
from ..crossing.pack_state import put_state
from ..errors import Refused
from ..families import plan_or_whole
from ..families.plan import COMPILE
from ..forward import forward_name
from ..methods.blocks import blocks_of
from ..methods.factory import make_method
from ..methods.method import Rank
from ..methods.recordings import GATHERED, Recordings, Replays, why_not_recorded
from ..weights.device_weights import DeviceWeights
from ..weights.fp32_forward import arguments_in_fp32, computing_in_fp32
from ..weights.gguf import is_dequantised_late, with_patches
from ..weights.offloaded_weights import OffloadedWeights
from ..weights.placement import WeightPlacement
from ..weights.quantisation import stored_bytes
from ..weights.sharded_weights import ShardedWeights
from ..weights.weight_patches import unpack_patches
from ..wire.messages import Load, Recorded
from .object_patches import ObjectPatches
from .patched_sets import PatchedSets
from .trail import Trail

log = logging.getLogger("pipemesh")
# Options by which a model computes in numbers that are not its weights', or keeps such
OWN_NUMBERS = (BACKEND, SETTINGS, COMPILE, KEPT)
NOT_COMPILED = (
    "weights are sharded, and gathered before each layer. The ranks run this MODEL uncompiled; whole weights"
    " would be compiled."
)


class CountingRank(Rank, Protocol):
    """Counts too, for the user who waits for a load or a patching. ``trail``: where its GPU is in
    the request at hand; None on a CPU.
    """

    trail: Trail | None

    def count(self, done: int, total: int) -> None:
        """Note how much of the request at hand is done."""


class ResidentModel:
    """``patcher`` is the host's own ModelPatcher. Its weights are on this rank's device; in a
    pipeline it has those of its own blocks alone.

    ``load`` is the request that loads it. ``kernels`` are the rank's attention kernels. ``readers``
    are the ranks with which it reads whole weights, by ``weights.read``. ``free_bytes``: see
    ``PatchedSets``. Raises Refused or LayoutError if the model cannot run in this layout.
    """

    def __init__(
        self,
        patcher: Any,
        device: torch.device,
        mesh: Mesh,
        rank: CountingRank,
        load: Load,
        kernels: Kernels = TORCHS,
        readers: Readers | None = None,
        free_bytes: Callable[[torch.device], int] = lambda device: 0,
    ):
        self.patcher = patcher
        self.device = device
        self._mesh = mesh
        self.patches_id = ""
        self._run: int | None = None  # that the model knows to be on
        self._objects = ObjectPatches(patcher.model, device)
        transformer = patcher.model.diffusion_model
        plan = plan_or_whole(type(transformer))
        if plan is None:
            raise Refused(f"{type(transformer).__name__} has no token plan.")
        self.recordings: Recordings | None = None
        if not mesh.unrecorded and mesh.link is None:
            self.recordings = Recordings(transformer, mesh.sequence, rank.tick)
        tick = None if self.recordings is None else self.recordings.tick
        # The method first, so that no weights of other stages' blocks are moved.
        self.method = make_method(transformer, plan, mesh, rank, load.stages, kernels, tick)
        on_progress = counted(rank, stored_bytes(transformer.parameters()))
        self.weights = self._placed(load, mesh.sequence.weights, readers, on_progress)
        self.sets = PatchedSets(self.weights, device, free_bytes)
        self._void_recordings()
        if self.weights.turns is not None:
            self.weights.turns.attach()  # first: a layer has its weights before anything else happens to it
        self.method.attach()

    def _placed(
        self,
        load: Load,
        gather: ShardGather | None,
        readers: Readers | None,
        on_progress: Callable[[int], None],
    ) -> WeightPlacement:
        """Place the weights in the way that the request wants. If they are sharded, every rank of a
        sequence must call this, and ``gather`` joins the shards.
        """
        model, device = self.patcher.model.diffusion_model, self.device
        if load.weights == "offloaded":
            return OffloadedWeights(self.patcher, device, load.budget, on_progress)
        if load.weights == "sharded":
            assert gather is not None  # made before the load
            return ShardedWeights(model, device, gather, on_progress, load.by_layer)
        return DeviceWeights(model, device, on_progress, readers=readers)

    @cached_property  # every answer reports it
    def nbytes(self) -> int:
        return self.weights.nbytes

    @cached_property
    def kept(self) -> KeptTokens | None:
        transformer, sequence = self.patcher.model.diffusion_model, self._mesh.sequence
        plan = plan_or_whole(type(transformer))
        if plan is None or plan.kept is None:
            return None
        blocks = len(list(blocks_of(transformer, plan)))
        ranks = self._mesh.layout.world_size
        return KeptTokens(
            plan.kept, self.device, Sharers(lambda: sequence.world.size, sequence.any_wishes, blocks, ranks)
        )

    def detach(self) -> None:
        if self.kept is not None:
            self.kept.free()
        self.method.detach()
        self._void_recordings()
        if self.weights.turns is not None:
            self.weights.turns.detach()

    def patch(
        self,
        patches_id: str,
        patches: dict | None,
        objects: dict | None,
        rank: CountingRank,
        comes_back: bool = False,
    ) -> bool:
        """Replace all weight patches by ``patches``, or without them by the set of this name if it
        is kept: False if it is not, and nothing changes. Replace all object patches by ``objects``;
        without them the present ones stay, with the state that nodes' code keeps of the run.
        ``comes_back``: sets take turns, so the one in place and this one are kept if there is room.
        """
        if patches is None and not self.sets.has(patches_id):
            return False
        self.sets.leave(self.patches_id, comes_back)
        known = self.sets.names_in(patches_id)
        self.sets.restore(known)
        self.patches_id = ""
        self._run = None  # what the model kept is of other weights
        self._void_recordings()
        if objects is not None:
            self._objects.put(objects, self.weights.has)
            self._void_recordings()
        for name in self._objects.weights.keys() - {*known}:
            self.weights.replace(name, self._objects.weights[name])
        if known:
            self.sets.put(patches_id)
        else:
            self._merge(patches or {}, rank)
        self.patches_id = patches_id
        return True

    def _void_recordings(self) -> None:
        """Give up CUDA graphs, which read the weights and objects that were there."""
        if self.recordings is not None:
            self.recordings.refuses = self._why_unrecorded()
            self.recordings.void()

    def _why_unrecorded(self) -> str:
        """Return why no evaluation is recorded as CUDA graphs; empty if they can be."""
        plan = plan_or_whole(type(self.patcher.model.diffusion_model))
        if self.weights.turns is not None:
            return GATHERED
        if isinstance(self.weights, OffloadedWeights):
            return "weights lie partly in main memory"
        if self._objects.in_block.methods:
            return "nodes' code is in its blocks"
        return "" if plan is None else why_not_recorded(plan)

    def _merge(self, patches: dict, rank: CountingRank) -> None:
        self.patcher.patches = {
            key: value for key, value in unpack_patches(patches).items() if self.weights.has(key)
        }
        if self.weights.applies(self.patcher.patches):
            return
        mine = tuple(self.patcher.patches)
        self.sets.keep_loaded(name for name in mine if name not in self._objects.weights)
        on_progress = counted(rank, len(mine))
        for key in mine:
            self.weights.replace(key, self._patched(key))
            on_progress(1)
        self.patcher.patches = {}
        self.sets.in_place = mine

    def _patched(self, key: str) -> torch.Tensor:
        weight = self.weights.get(key)
        if is_dequantised_late(weight):
            device = self.device if self.patcher.patch_on_device else torch.device("cpu")
            return with_patches(weight, self.patcher.patches[key], key, device)
        with self.weights.in_place(key):
            return self.patcher.patch_weight_to_device(key, device_to=self.device, return_weight=True)

    def _tell(self, run: int | None) -> None:
        """Tell the model the present run, as ComfyUI's patchers do: it may keep tensors that
        evaluations of the run share. It is not told if weights are gathered block by block: all
        ranks must compute the same layers then, and ranks with less memory would keep nothing.
        """
        keeps = run is not None and self.weights.turns is None
        self.patcher.model.current_patcher = self.patcher if keeps else None
        self._run = run

    def on_rank(self, arguments: dict[str, Any], number: int) -> Any:
        """Compute the part that the method has begun."""
        part = self.method.part
        if part.run != self._run:
            self._tell(part.run)
        if self._objects.in_block.state:
            put_state(self._objects.in_block.state)
        if self.weights.turns is not None:
            arguments = self._uncompiled(arguments)
        if "transformer_options" in arguments:
            options = options_made(arguments["transformer_options"], self._objects.in_block.patches)
            options = options if self.kept is None else self.kept.put(options, (part.run, part.attempt))
            arguments = {**arguments, "transformer_options": options}
        transformer = self.patcher.model.diffusion_model
        forward = getattr(transformer, forward_name(transformer))
        turns = self.weights.turns
        with nullcontext() if turns is None else turns.evaluation():
            if self.recordings is None:
                output = self.method.forward(forward, arguments, number)
            else:
                output = self.recordings.evaluate(
                    arguments, lambda given: self.method.forward(forward, given, number), self.method.forget
                )
            if turns is not None:
                turns.learn()
            return output

    def _uncompiled(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Leave ``torch.compile`` out if weights are sharded: the gather before each layer ends a
        graph, and the compiler gives up most of so many graphs.
        """
        options = arguments.get("transformer_options", {})
        if COMPILE not in options:
            return arguments
        tell_uncompiled(self._mesh.rank)
        return {
            **arguments,
            "transformer_options": {name: value for name, value in options.items() if name != COMPILE},
        }

    def end_run(self, room: int = -1) -> Recorded | None:
        """Free all that was kept for later evaluations of the run beside the method, and the memory
        in which weights arrive. Recorded CUDA graphs stay if they take at most ``room`` bytes.
        Return what was replayed of them, on a GPU.
        """
        replays = Replays(why=self._mesh.unrecorded or "the pool is a pipeline")
        if self.recordings is not None:
            replays = self.recordings.end_run(room)
        clean_up(self._objects.in_block.patches)
        if self.kept is not None:
            self.kept.free()
        if self.weights.turns is not None:
            self.weights.turns.end_run()
        self._tell(None)
        self.sets.end_run()
        is_told = self.device.type == "cuda"
        return Recorded(replays.evaluations, replays.replayed, replays.why) if is_told else None


def in_fp32(model: ResidentModel, arguments: dict[str, Any], number: int) -> Any:
    """Compute as ``on_rank`` does, in fp32. Data that the model keeps of other evaluations is not
    used, and no CUDA graph stands for it.
    """
    transformer = model.patcher.model.diffusion_model
    plan = plan_or_whole(type(transformer))
    prefix = plan.prefix if plan is not None else None
    recordings, model.recordings = model.recordings, None
    try:
        with computing_in_fp32(transformer, prefix.forget if prefix is not None else ""):
            return model.on_rank(arguments_in_fp32(arguments, OWN_NUMBERS), number)
    finally:
        model.recordings = recordings


def counted(rank: CountingRank, total: int) -> Callable[[int], None]:
    """Return a function that takes the additional progress: bytes of a load, weights of a patching.
    ``total`` is the whole amount.
    """
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        rank.tick()
        rank.count(min(done, total), total)

    add(0)
    return add


@cache
def tell_uncompiled(rank: int) -> None:
    """Say so once, for all ranks."""
    if rank == 0:
        log.warning("[PipeMesh] torch.compile is left out: %s", NOT_COMPILED)
