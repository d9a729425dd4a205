"""Run every rank of a layout on a device that is not there: what each would compute, hold and send
in one evaluation of a released model, and whether it runs at all.

The model is ComfyUI's own at its published size, the methods and communicators are those of a pool;
torch's fake process group takes their messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from ..comm.mesh import Mesh, connect, open_weights
from ..families import plan_for
from ..families.plan import TokenPlan
from ..families.sample import WHOLE_SEQUENCES, Extent, Released, Sample, TokenParts
from ..forward import forward_name
from ..layout import Layout
from ..methods.blocks import blocks_of
from ..methods.factory import make_method
from ..methods.hooks import Attention, TokenHooks
from ..methods.inserts import inserts_of, named
from ..patches import Part, TokenGrid
from ..stages import Stage, share_out
from ..weights.main_memory import InMainMemory, tables_of
from ..weights.placeholder import Placeholder
from ..weights.sharded_weights import ShardedWeights
from ..weights.shared_layers import Sharing, shared_layers
from .dry_device import DEVICE, dry_device, is_on_device
from .figures import Activations, RankFigures, Shareable, Unshared, Whole
from .quick_fake import QuickFakeMode
from .recorder import BEHIND, FRAMED, FRAMED_BEHIND, SHARED, OwnRows, Recorder
from .released_model import arguments_of, empty_model, forget_tensors, latent_shapes

TURN = 128  # numbers of requests are multiples: messages have them modulo this, and the device's values are 0
WARM_UP = Part(1, 0)


class DryModel:
    """A released model to run dry, in bf16, at batch 1. ``extent``: the request's, where it is not
    the usual one.
    """

    def __init__(self, sample: Sample, released: Released, extent: Extent | None = None):
        self.released = released
        self.extent = extent or released.extent
        self._sample = sample
        self._mode = QuickFakeMode()
        forget_tensors()  # of another mode
        self._model = self._build()
        with dry_device(self._mode):
            shapes = latent_shapes(self._model, released, self.extent)
            self._arguments = arguments_of(self._model, sample, released, shapes, DEVICE)
        self._shape = shapes[0]
        plan = plan_for(type(self._model.diffusion_model))
        assert plan is not None, f"{released.name} has no plan"
        self.plan: TokenPlan = plan

    def _build(self) -> Any:
        """Build it as a rank has it: ComfyUI makes some tensors without asking where."""
        with dry_device(self._mode):
            model = empty_model(self._sample, self.released, torch.bfloat16, DEVICE)
            for module in model.diffusion_model.modules():
                for tensors in (module._parameters, module._buffers):
                    found = {
                        name: tensor
                        for name, tensor in tensors.items()
                        if tensor is not None and not is_on_device(tensor)
                    }
                    cast("dict[str, Any]", tensors).update(
                        {name: tensor.to(DEVICE) for name, tensor in found.items()}
                    )
            return model

    def _forward(self, model: Any) -> Any:
        return getattr(model.diffusion_model, forward_name(model.diffusion_model))

    def whole(self) -> Whole:
        """Run the model on one device as ComfyUI does."""
        return counted(self._model, self.plan, self._arguments, self._mode, cut=self.released.cut)

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
        stages = share_out(whole.block_flops, layout.stages) if layout.stages > 1 else ()
        parts = self.parts(whole, layout, patches)
        with joined(layout, rank) as mesh, as_it_was(self._model.diffusion_model, self.plan):
            model, turns, held = self._model, None, 0
            idle = IdleRank(parts)
            method = make_method(
                model.diffusion_model, self.plan, mesh, idle, [stage.size for stage in stages]
            )
            if kept == "sharded":
                open_weights(mesh)
            counted = Sent(mesh)
            try:
                with dry_device(self._mode) as figures:
                    figures.chosen = 1 / self.released.cut.experts
                    figures.memory.leave_out(weights_of(model))
                    if kept == "sharded" and mesh.sequence.weights is not None:
                        turns = ShardedWeights(
                            model.diffusion_model, DEVICE, mesh.sequence.weights, lambda nbytes: None
                        ).turns
                        turns.attach()
                        held = figures.memory.live
                    method.attach()
                    for idle.at, part in enumerate(parts):
                        if idle.at == 1:
                            figures.by_rows.clear()
                            figures.messages.clear()
                            figures.waits.clear()
                            counted = Sent(mesh)
                        method.begin(part)
                        with nullcontext() if turns is None else turns.evaluation():
                            method.forward(self._forward(model), dict(self._arguments), TURN * (idle.at + 1))
                        counted.add()
                    kept_bytes = figures.memory.live
                    if turns is not None:
                        mesh.sequence.free_buffers()
                        without_room = figures.memory.live
                        turns.end_run()
                        held += without_room - figures.memory.live
            finally:
                method.detach()
                if turns is not None:
                    turns.detach()
            return RankFigures(
                rank=rank,
                weight_bytes=stored_bytes(weights_of(model)) + held,
                flops=figures.flops,
                sent_bytes=counted.by_axis,
                wired_bytes=sum(figures.messages.values()),
                peak_bytes=figures.memory.peak - held,
                kept_bytes=kept_bytes - held,
                waits=dict(figures.waits),
                stage=span(stages, mesh),
                cut=self._cut(whole, parts),
            )

    def _cut(self, whole: Whole, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Return the patches' tokens of the stream that leaves. The last has those behind them."""
        patches = [part.patch for part in parts if part.patch is not None]
        return [
            (start, whole.tokens[self.plan.leave.stream] if last else start + size)
            for start, size, last in patches
        ]

    def parts(self, whole: Whole, layout: Layout, patches: int) -> list[Part]:
        """Return the requests of a rank: one of all tokens; in a pipeline, each patch after it, if
        the model's evaluations can be cut.
        """
        if layout.stages == 1 or self.plan.together.always:
            return [WARM_UP]
        text = sum(count for stream, count in whole.tokens.items() if stream != self.plan.leave.stream)
        grid = TokenGrid.of(self._shape, self.plan.patch_size_of(self._model.diffusion_model))
        cut = grid.cut(patches or layout.stages + 1, text)
        return [WARM_UP, *(Part(1, 0, (patch.start, patch.size, patch.last)) for patch in cut)]


def counted(
    model: Any,
    plan: TokenPlan,
    arguments: dict[str, Any],
    mode: QuickFakeMode,
    attention: Attention | None = None,
    cut: TokenParts = WHOLE_SEQUENCES,
) -> Whole:
    """Run a model without content on one device, as ComfyUI does. ``attention`` takes the place of
    ComfyUI's. ``cut``: how the released model's layers cut tokens. A model that ranks never cut is
    one block.
    """
    transformer, handles = model.diffusion_model, []
    with dry_device(mode) as figures:
        figures.chosen = 1 / cut.experts
        figures.memory.leave_out(weights_of(model))
        recorder = Recorder(figures, attention)
        hooks = TokenHooks(transformer, plan, recorder) if plan.blocks else None
        forward = getattr(transformer, forward_name(transformer))
        if hooks is not None:
            hooks.attach()
            blocks = list(blocks_of(transformer, plan))
            (first, at, group), (last, end, _) = blocks[0], blocks[-1]
            handles = [first[at].register_forward_pre_hook(recorder.note_width(group), with_kwargs=True)]
            if plan.leaves_behind_blocks:
                handles.append(last[end].register_forward_hook(lambda *_: recorder.leave(None, None)))
            for insert in inserts_of(plan):
                is_within = insert.path.startswith(tuple(f"{group.path}." for group in plan.blocks))
                kind = (
                    (SHARED if is_within else BEHIND)
                    if insert.frames is None
                    else (FRAMED if is_within else FRAMED_BEHIND)
                )
                for module in named(transformer, insert.path):
                    enter, leave = recorder.enter_insert(module, insert), recorder.leave_insert(kind)
                    handles += [
                        module.register_forward_pre_hook(enter, with_kwargs=True),
                        module.register_forward_hook(leave),
                    ]
            handles += [
                layer.module.register_forward_pre_hook(recorder.order.note(layer))
                for layer in shared_layers(transformer)
            ]
        try:
            forward(**(arguments if hooks is None else hooks.arguments(arguments)))
        finally:
            for handle in handles:
                handle.remove()
            if hooks is not None:
                hooks.detach()
    marks = [*(recorder.marks or [Counter()]), recorder.left or figures.by_rows]
    block_flops = [after.total() - before.total() for before, after in pairwise(marks)]
    own = OwnRows(recorder.tokens, arguments.get(plan.prefix.counted_by, 0) if plan.prefix else 0, cut)
    weights = nbytes(weights_of(model))
    block_weights = (
        [nbytes(container[index].parameters()) for container, index, _ in blocks_of(transformer, plan)]
        if hooks
        else [weights]
    )
    return Whole(
        weight_bytes=weights,
        block_weight_bytes=block_weights,
        block_flops=block_flops,
        around_flops=figures.flops - sum(block_flops),
        activations=Activations(
            figures.memory.peak, sorted((size, kernels) for size, kernels in figures.moved.items() if size)
        ),
        attended_by_block=recorder.attended or [[]],
        tokens=recorder.tokens,
        hidden=recorder.hidden,
        shareable=shareable(transformer, plan, sum(layer.nbytes for layer in recorder.order.turns))
        if hooks
        else Shareable([0], 0, 0, 0),
        unshared=Unshared(
            [own.apart(*pair) for pair in pairwise(marks)], figures.flops - marks[-1].total(), recorder.frames
        ),
    )


class IdleRank:
    """A rank that has got all its requests, and has room for everything. ``at``: the request at
    hand.
    """

    def __init__(self, parts: Sequence[Part]):
        self.at = 0
        self._parts = parts

    def tick(self) -> None: ...

    def note(self, phase: str) -> None: ...

    def next_part(self) -> Part | None:
        return self._parts[self.at + 1] if self.at + 1 < len(self._parts) else None

    def reserve(self, nbytes: int) -> None: ...


class Sent:
    """Adds up what a rank's communicators count anew for each request."""

    def __init__(self, mesh: Mesh):
        self.by_axis: dict[str, int] = {}
        self._mesh = mesh

    def add(self) -> None:
        for axis, part in self._mesh.parts.items():
            self.by_axis[axis] = self.by_axis.get(axis, 0) + part.sent_bytes


@contextmanager
def joined(layout: Layout, rank: int, via_cpu: bool = False) -> Iterator[Mesh]:
    """Make the mesh of one rank in a world that has no other ranks. ``via_cpu``: messages go
    through the CPU's memory, as over gloo.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if layout.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield connect(layout, rank, device_type="cpu", via_cpu=via_cpu, wants_stop=lambda: False)
    finally:
        if layout.world_size > 1:
            dist.destroy_process_group()


@contextmanager
def as_it_was(transformer: torch.nn.Module, plan: TokenPlan) -> Iterator[None]:
    """Puts back the blocks that a stage leaves out, and the weights that ranks share out."""
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


def weights_of(model: Any) -> tuple[torch.Tensor, ...]:
    """Those on the device."""
    every = (*model.diffusion_model.parameters(), *model.diffusion_model.buffers())
    return tuple(tensor for tensor in every if not isinstance(tensor, (InMainMemory, Placeholder)))


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors, of which some may stand for more than they hold."""
    return sum(
        {
            storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)
        }.values()
    )


def shareable(transformer: torch.nn.Module, plan: TokenPlan, turn_bytes: int) -> Shareable:
    paths = [f"{group.path}.{index}." for _, index, group in blocks_of(transformer, plan)]
    layers: list[list[int]] = [[] for _ in (*paths, "around")]
    for layer in shared_layers(transformer):
        layers[next((place for place, path in enumerate(paths) if layer.path.startswith(path)), -1)].append(
            layer.nbytes
        )
    *blocks, around = map(sum, layers)
    sharing = Sharing.of([size for one in layers for size in one], 0)
    aside = sum(table.nbytes for table in tables_of(transformer))
    return Shareable(blocks, around, sharing.largest, sharing.two, aside, turn_bytes - sharing.shared, layers)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def span(stages: Sequence[Stage], mesh: Mesh) -> tuple[int, int] | None:
    """Return the blocks [first, end) of the rank's stage."""
    if not stages:
        return None
    stage = stages[mesh.layout.stage(mesh.rank)]
    return stage.first, stage.end
