"""Run every rank of a layout on a device that is not there: what each would compute, hold and send
in one evaluation of a released model, and whether it runs at all.

The model is ComfyUI's own at its published size, the methods and communicators are those of a pool;
torch's fake process group takes their messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..comfy_bridge.forward import forward_name
from ..comfy_bridge.released_model import Extent, arguments_of, empty_model, latent_shape
from ..comfy_bridge.sharded_weights import ShardedWeights
from ..comfy_bridge.shared_layers import Sharing, shared_layers
from ..comm.mesh import Mesh, connect, open_weights
from ..families import plan_for
from ..families.plan import TokenPlan
from ..families.sample import Released, Sample
from ..layout import Layout
from ..methods.factory import make_method
from ..methods.hooks import Attention, TokenHooks, blocks_of
from ..methods.shards import Rows
from ..patches import Part, TokenGrid
from ..stages import Stage, share_out
from .dry_device import DEVICE, Counts, dry_device
from .figures import Attended, RankFigures, Shareable, Whole
from .quick_fake import QuickFakeMode

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
        self._model = self._build()
        with dry_device(self._mode):
            self._shape = latent_shape(self._model, self.extent)
            self._arguments = arguments_of(self._model, sample, released, self._shape, DEVICE)
        plan = plan_for(type(self._model.diffusion_model))
        assert plan is not None, f"{released.name} has no plan"
        self.plan: TokenPlan = plan

    def _build(self) -> Any:
        with dry_device(self._mode):
            return empty_model(self._sample, self.released, torch.bfloat16, DEVICE)

    def _forward(self, model: Any) -> Any:
        return getattr(model.diffusion_model, forward_name(model.diffusion_model))

    def whole(self) -> Whole:
        """Run the model on one device as ComfyUI does."""
        return counted(self._model, self.plan, self._arguments, self._mode, self.released.size.hidden)

    def rank(self, layout: Layout, rank: int, whole: Whole, patches: int = 0, kept: Literal["whole", "sharded"] = "whole") -> RankFigures:
        """Run one rank of ``layout``. ``patches``: of a pipeline, 0 for one more than stages.
        ``kept``: how it keeps its weights.
        """
        stages = share_out(whole.block_flops, layout.pipefusion) if layout.pipefusion > 1 else ()
        parts = self._parts(whole, layout, patches)
        with joined(layout, rank) as mesh, as_it_was(self._model.diffusion_model, self.plan):
            model, turns, held = self._model, None, 0
            idle = IdleRank(parts)
            method = make_method(model.diffusion_model, self.plan, mesh, idle, [stage.size for stage in stages])
            if kept == "sharded":
                open_weights(mesh)
            counted = Sent(mesh)
            try:
                with dry_device(self._mode) as figures:
                    figures.leave_out(weights_of(model))
                    if kept == "sharded" and mesh.sequence.weights is not None:
                        turns = ShardedWeights(model.diffusion_model, DEVICE, mesh.sequence.weights, lambda nbytes: None).turns
                        turns.attach()
                        held = figures.live
                    method.attach()
                    for idle.at, part in enumerate(parts):
                        if idle.at == 1:
                            figures.flops = 0
                            figures.messages.clear()
                            figures.waits.clear()
                            counted = Sent(mesh)
                        method.begin(part)
                        method.evaluate(self._forward(model), dict(self._arguments), TURN * (idle.at + 1))
                        counted.add()
                        if turns is not None:
                            turns.end_evaluation()
                    kept_bytes = figures.live
                    if turns is not None:
                        mesh.sequence.free_buffers()
                        without_room = figures.live
                        turns.end_run()
                        held += without_room - figures.live
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
                peak_bytes=figures.peak - held,
                kept_bytes=kept_bytes - held,
                waits=dict(figures.waits),
                stage=span(stages, mesh),
                patches=max(1, len(parts) - 1),
            )

    def _parts(self, whole: Whole, layout: Layout, patches: int) -> list[Part]:
        """Return the requests of a rank: one of all tokens; in a pipeline, each patch after it."""
        if layout.pipefusion == 1:
            return [WARM_UP]
        text = sum(count for stream, count in whole.tokens.items() if stream != self.plan.leave.stream)
        grid = TokenGrid.of(self._shape, self.plan.patch_size_of(self._model.diffusion_model))
        cut = grid.cut(patches or layout.pipefusion + 1, text)
        return [WARM_UP, *(Part(1, 0, (patch.start, patch.size, patch.last)) for patch in cut)]


def counted(
    model: Any, plan: TokenPlan, arguments: dict[str, Any], mode: QuickFakeMode, hidden: int = 0, attention: Attention | None = None
) -> Whole:
    """Run a model without content on one device, as ComfyUI does. ``hidden``: as wide as its rows
    are; 0 for as wide as the queries of its first attention. ``attention`` takes the place of
    ComfyUI's. A model that is never cut is one block.
    """
    transformer = model.diffusion_model
    with dry_device(mode) as figures:
        figures.leave_out(weights_of(model))
        recorder = Recorder(figures, attention)
        hooks = TokenHooks(transformer, plan, recorder) if plan.blocks else None
        forward = getattr(transformer, forward_name(transformer))
        if hooks is not None:
            hooks.attach()
        try:
            forward(**(arguments if hooks is None else hooks.arguments(arguments)))
        finally:
            if hooks is not None:
                hooks.detach()
    marks = recorder.marks or [0]
    block_flops = [after - before for before, after in pairwise([*marks, recorder.left or figures.flops])]
    weights = nbytes(weights_of(model))
    blocks = [nbytes(container[index].parameters()) for container, index, _ in blocks_of(transformer, plan)] if hooks else [weights]
    first = next((one for block in recorder.attended for one in block), None)
    return Whole(
        weight_bytes=weights,
        block_weight_bytes=blocks,
        block_flops=block_flops,
        around_flops=figures.flops - sum(block_flops),
        peak_bytes=figures.peak,
        attended_by_block=recorder.attended or [[]],
        tokens=recorder.tokens,
        hidden=hidden or (first.heads * first.head_dim if first else 0),
        shareable=shareable(transformer, plan) if hooks else Shareable([0], 0, 0, 0),
    )


class Recorder:
    """A Sharding that computes everything and notes the plan's blocks and the attentions in each.
    ``marks``: what was computed at each block's beginning; ``left``: and where the tokens leave, if
    that is a module of its own.
    """

    def __init__(self, figures: Counts, attention: Attention | None = None):
        self._instead = attention
        self.marks: list[int] = []
        self.left = 0
        self.attended: list[list[Attended]] = []
        self.tokens: Mapping[str, int] = {}
        self._figures = figures

    def choose_rows(self, all_tokens: Mapping[str, int]) -> None:
        self.tokens = dict(all_tokens)

    def enter_block(self) -> None:
        self.marks.append(self._figures.flops)
        self.attended.append([])

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        return local_BlC

    def attend(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        skips = kwargs.get("skip_reshape", False)
        self.attended[-1].append(Attended(q.shape[2 if skips else 1], heads, q.shape[-1] if skips else q[0, 0].numel() // heads))
        return (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)

    def attend_over(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)  # what travels of it is as small as the whole queries

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> None:
        self.left = self._figures.flops


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
        sequence, link = self._mesh.sequence, self._mesh.link
        now = {
            "ulysses": sequence.ulysses,
            "ring": sequence.ring,
            "gather": sequence.world,
            "weights": sequence.weights,
            "pipefusion": link,
        }
        for axis, part in now.items():
            if part is not None:
                self.by_axis[axis] = self.by_axis.get(axis, 0) + part.sent_bytes


@contextmanager
def joined(layout: Layout, rank: int) -> Iterator[Mesh]:
    """Make the mesh of one rank in a world that has no other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if layout.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield connect(layout.degrees(), rank, device_type="cpu", via_cpu=False, wants_stop=lambda: False)
    finally:
        if layout.world_size > 1:
            dist.destroy_process_group()


@contextmanager
def as_it_was(transformer: torch.nn.Module, plan: TokenPlan) -> Iterator[None]:
    """Puts back the blocks that a stage leaves out, and the weights that ranks share out."""
    blocks = [(container, index, container[index]) for container, index, _ in blocks_of(transformer, plan)]
    weights = [(module, dict(module._parameters)) for module in transformer.modules()]
    try:
        yield
    finally:
        for container, index, block in blocks:
            container[index] = block
        for module, parameters in weights:
            module._parameters.update(parameters)


def weights_of(model: Any) -> tuple[torch.Tensor, ...]:
    return (*model.diffusion_model.parameters(), *model.diffusion_model.buffers())


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors, of which some may stand for more than they hold."""
    return sum({storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def shareable(transformer: torch.nn.Module, plan: TokenPlan) -> Shareable:
    layers = shared_layers(transformer)
    paths = [f"{group.path}.{index}." for _, index, group in blocks_of(transformer, plan)]
    blocks = [sum(layer.nbytes for layer in layers if layer.path.startswith(path)) for path in paths]
    sharing = Sharing.of([layer.nbytes for layer in layers], 0)
    return Shareable(blocks, sharing.shared - sum(blocks), sharing.largest, sharing.two)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def span(stages: Sequence[Stage], mesh: Mesh) -> tuple[int, int] | None:
    """Return the blocks [first, end) of the rank's stage."""
    if not stages:
        return None
    stage = stages[mesh.axes["pipefusion"].rank]
    return stage.first, stage.end
