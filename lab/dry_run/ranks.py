"""Run every rank of a layout on a device that is not there: what each would compute, hold and send
in one evaluation of a released model, and whether it runs at all.

The model is ComfyUI's own at its published size, the methods and communicators are those of a pool;
torch's fake process group takes their messages.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from ...parallel_runtime.attention.kernels import TORCHS
from ...parallel_runtime.attention.merge_operation import in_one
from ...parallel_runtime.comm.mesh import Mesh, connect, open_weights
from ...parallel_runtime.crossing.block_code import without_rebuilt
from ...parallel_runtime.families.plan import TokenPlan
from ...parallel_runtime.forward import forward_name
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.methods.blocks import blocks_of
from ...parallel_runtime.methods.factory import make_method
from ...parallel_runtime.methods.recordings import GATHERED, Recordings, why_not_recorded
from ...parallel_runtime.patches import Part, TokenGrid
from ...parallel_runtime.planner.dry_device import DEVICE
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.keeping import own_weights
from ...parallel_runtime.stages import share_out
from ...parallel_runtime.weights.sharded_weights import ShardedWeights
from .device import Wait, dry_device
from .recorded import WARM_UP, ReplayCalls, replay_calls
from .released_model import DryModel
from .rows import WholeByRows, count_by_rows

TURN = 128  # numbers of requests are multiples: messages have them modulo this, and the device's values are 0
OF_STAGES = "the stages of a pipeline compute patches"
AS_TRIED = TORCHS._replace(merge=in_one)  # on a GPU with Triton


@dataclass(frozen=True)
class Watched:
    """What a device would be asked for. ``waits`` of the first evaluation; ``later_waits`` of the
    first one of the next run, whose messages ranks know (with weights shared out, of the second of
    this one), ``launches`` of kernels in it, a message as one, ``spared`` of which are none where a
    merge is one, and ``unaligned`` places of messages, which NCCL copies byte by byte. A pipeline
    has but one evaluation.
    """

    waits: Mapping[Wait, int] = field(default_factory=dict)
    later_waits: Mapping[Wait, int] = field(default_factory=dict)
    launches: int = 0
    spared: int = 0
    unaligned: int = 0


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One evaluation on one rank: under a pipeline all its patches, and ``peak_bytes`` of the
    warm-up too. Weights are not in ``peak_bytes``. ``kept_bytes`` of it are held when it has ended:
    keys and values, buffers for messages.

    ``sent_bytes``: by axis, the output's rows under ``gather``, parts of shared weights under
    ``weights``. ``wired_bytes``: what torch was given to send. ``stage``: the rank's blocks [first,
    end). ``cut``: tokens [start, end) of each patch, of the stream that leaves; empty without a
    pipeline.
    """

    rank: int
    weight_bytes: int
    flops: int
    sent_bytes: Mapping[str, int]
    wired_bytes: int
    peak_bytes: int
    kept_bytes: int
    watched: Watched
    stage: tuple[int, int]
    cut: Sequence[tuple[int, int]] = ()

    @property
    def patches(self) -> int:
        return max(1, len(self.cut))


class DryRanks(DryModel):
    """A released model whose ranks run dry."""

    def whole(self) -> WholeByRows:
        return count_by_rows(self.model, self.plan, self.arguments, self.mode, self.released.cut)

    def rank(
        self,
        layout: Layout,
        rank: int,
        whole: Whole,
        patches: int = 0,
        kept: Literal["whole", "sharded"] = "whole",
    ) -> RankFigures:
        """Run one rank of ``layout``. ``patches``: of a pipeline, 0 for one more than stages.
        ``kept``: how it keeps its weights.
        """
        stages = share_out(whole.block_flops, layout.stages)
        parts = parts_of(self, whole, layout, patches)
        transformer = self.model.diffusion_model
        with joined(layout, rank) as mesh, as_it_was(transformer, self.plan):
            turns, held = None, 0
            idle = IdleRank(parts)
            sizes = [stage.size for stage in stages] if layout.stages > 1 else ()
            method = make_method(transformer, self.plan, mesh, idle, sizes, AS_TRIED)
            if kept == "sharded":
                open_weights(mesh)
            if layout.stages == 1:  # ranks compare their tokens there, as on a GPU
                mesh.sequence.device = DEVICE
            sent = Sent(mesh)
            try:
                with dry_device(self.mode) as counts:
                    counts.chosen = 1 / self.released.cut.experts
                    counts.memory.leave_out(own_weights(self.model.diffusion_model))
                    if kept == "sharded" and mesh.sequence.weights is not None:
                        turns = ShardedWeights(
                            transformer, DEVICE, mesh.sequence.weights, lambda nbytes: None
                        ).turns
                        assert turns is not None
                        turns.attach()
                        held = counts.memory.live
                    method.attach()
                    forward = getattr(transformer, forward_name(transformer))
                    for idle.at, part in enumerate(parts):
                        if idle.at == 1:
                            counts.flops = counts.launches = counts.spared = counts.unaligned = 0
                            counts.messages.clear()
                            counts.waits.clear()
                            sent = Sent(mesh)
                        method.begin(part)
                        with nullcontext() if turns is None else turns.evaluation():
                            method.forward(forward, dict(self.arguments), TURN * (idle.at + 1))
                        sent.add()
                    gc.collect()  # else what lies in cycles counts, or not, by when it is freed
                    kept_bytes, peak_bytes = counts.memory.live, counts.memory.peak
                    flops, wired_bytes, waits = (
                        counts.flops,
                        sum(counts.messages.values()),
                        dict(counts.waits),
                    )
                    if layout.stages == 1:
                        counts.launches = counts.spared = counts.unaligned = 0
                        counts.waits.clear()
                        method.begin(WARM_UP)
                        with nullcontext() if turns is None else turns.evaluation():
                            method.forward(forward, dict(self.arguments), TURN * (len(parts) + 1))
                    if turns is not None:
                        mesh.sequence.free_buffers()
                        without_room = counts.memory.live
                        turns.end_run()
                        held += without_room - counts.memory.live
            finally:
                method.detach()
                if turns is not None:
                    turns.detach()
            stage = stages[mesh.layout.stage(rank)]
            return RankFigures(
                rank=rank,
                weight_bytes=stored_bytes(own_weights(self.model.diffusion_model)) + held,
                flops=flops,
                sent_bytes=sent.by_axis,
                wired_bytes=wired_bytes,
                peak_bytes=peak_bytes - held,
                kept_bytes=kept_bytes - held,
                watched=Watched(waits, dict(counts.waits), counts.launches, counts.spared, counts.unaligned),
                stage=(stage.first, stage.end),
                cut=self._cut(whole, parts),
            )

    def replays(self, layout: Layout, kept: Literal["whole", "sharded"] = "whole") -> ReplayCalls:
        """Record an evaluation on the last rank of ``layout``, and replay it."""
        transformer = self.model.diffusion_model
        with joined(layout, layout.world_size - 1) as mesh, as_it_was(transformer, self.plan):
            if mesh.link is not None:
                return ReplayCalls(unrecorded=OF_STAGES)
            if kept == "sharded":
                open_weights(mesh)
            mesh.sequence.device = DEVICE
            why = GATHERED if kept == "sharded" else why_not_recorded(self.plan)
            recordings = Recordings(transformer, mesh.sequence, IdleRank([]).tick, why, worth=1)
            method = make_method(
                transformer, self.plan, mesh, IdleRank([WARM_UP]), (), AS_TRIED, recordings.tick
            )
            compute = partial(method.forward, getattr(transformer, forward_name(transformer)), number=TURN)
            try:
                with dry_device(self.mode) as counts:
                    counts.chosen = 1 / self.released.cut.experts
                    method.attach()
                    arguments = without_rebuilt(self.arguments, self.plan.rebuilt)
                    return replay_calls(method, recordings, counts, arguments, compute)
            finally:
                method.detach()

    def _cut(self, whole: Whole, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Return the patches' tokens of the stream that leaves. The last has those behind them."""
        patches = [part.patch for part in parts if part.patch is not None]
        return [
            (start, whole.tokens[self.plan.leave.stream] if last else start + size)
            for start, size, last in patches
        ]


def parts_of(model: DryModel, whole: Whole, layout: Layout, patches: int) -> list[Part]:
    """Return the requests of a rank: one of all tokens; in a pipeline, each patch after it, if the
    model's evaluations can be cut.
    """
    plan = model.plan
    if layout.stages == 1 or plan.together.always:
        return [WARM_UP]
    text = sum(count for stream, count in whole.tokens.items() if stream != plan.leave.stream)
    grid = TokenGrid.of(model.shape, plan.patch_size_of(model.model.diffusion_model))
    cut = grid.cut(patches or layout.stages + 1, text)
    return [WARM_UP, *(Part(1, 0, (patch.start, patch.size, patch.last)) for patch in cut)]


class IdleRank:
    """A rank that has got all its requests, and has room for everything. ``at``: the request at
    hand.
    """

    def __init__(self, parts: Sequence[Part]):
        self.at = 0
        self.parts = parts

    def tick(self) -> None: ...

    def note(self, phase: str) -> None: ...

    def next_part(self) -> Part | None:
        return self.parts[self.at + 1] if self.at + 1 < len(self.parts) else None

    def reserve(self, nbytes: int) -> None: ...


class Sent:
    """Adds up what a rank's communicators count anew for each request."""

    def __init__(self, mesh: Mesh):
        self.by_axis: dict[str, int] = {}
        self._mesh = mesh

    def add(self) -> None:
        for axis, sent in self._mesh.sequence.traffic.sent_bytes.items():
            self.by_axis[axis] = self.by_axis.get(axis, 0) + sent


@contextmanager
def joined(layout: Layout, rank: int, via_cpu: bool = False) -> Iterator[Mesh]:
    """Make the mesh of one rank in a world that has no other ranks. ``via_cpu``: messages go
    through the CPU's memory, as over gloo.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if layout.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield connect(layout, rank, via_cpu=via_cpu, wants_stop=lambda: False)
    finally:
        if layout.world_size > 1:
            dist.destroy_process_group()


@contextmanager
def as_it_was(transformer: torch.nn.Module, plan: TokenPlan) -> Iterator[None]:
    """Put back the blocks that a stage leaves out, and the weights that ranks share out."""
    blocks = [(container, index, container[index]) for container, index, _ in blocks_of(transformer, plan)]
    weights = [
        (tensors, dict(tensors))
        for module in transformer.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    try:
        yield
    finally:
        for container, index, block in blocks:
            container[index] = block
        for tensors, before in weights:
            cast("dict[str, Any]", tensors).update(before)


def stored_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the memory of tensors, of which some may stand for more than they hold."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
