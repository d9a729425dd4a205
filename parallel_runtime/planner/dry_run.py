"""Count one evaluation of a model by a shape-only run: the model runs on a device that does not
exist, as ComfyUI runs it on one GPU. Hooks note the beginning of each block and the size of each
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..families.plan import TokenPlan
from ..forward import forward_name
from ..methods.blocks import blocks_of, taken
from ..methods.hooks import Attention, TokenHooks
from ..methods.shards import Rows
from .dry_device import DeviceCounts, computing_dry
from .evaluation_count import Activations, Attended, Whole
from .fake_mode import QuickFakeMode
from .keeping import model_bytes, own_weights


def count_evaluation(
    model: Any,
    plan: TokenPlan,
    arguments: dict[str, Any],
    mode: QuickFakeMode,
    attention: Attention | None = None,
    chosen: float = 1.0,
) -> Whole:
    """Count one evaluation of ``model``, a BaseModel. ``attention`` takes the place of ComfyUI's.
    ``chosen``: the share of tokens that each expert gets.
    """
    counts = DeviceCounts()
    counts.chosen = chosen
    recorder = Recorder(counts, attention)
    run_recorded(model, plan, arguments, mode, recorder)
    return recorder.whole(model, plan)


class Recorder:
    """A Sharding that computes everything and notes the plan's blocks and the attentions in each.
    ``before``: FLOPs and launches at each block's beginning; ``end``: and where the tokens leave.
    ``hidden``: how wide tokens enter the blocks. ``told``: rows that the hooks were told of.
    """

    def __init__(self, counts: DeviceCounts, attention: Attention | None = None):
        self.counts = counts
        self.before: list[tuple[int, int]] = []
        self.end: tuple[int, int] | None = None
        self.hidden = 0
        self.out: Any = ()
        self.attended: list[list[Attended]] = []
        self.tokens: Mapping[str, int] = {}
        self.told: Mapping[str, int] = {}
        self._instead = attention

    def hooks(self, transformer: torch.nn.Module, plan: TokenPlan) -> list[Any]:
        """Register hooks, after the hooks that name a block's arguments; return their handles."""
        blocks = list(blocks_of(transformer, plan))
        (first, at, group), (last, end, _) = blocks[0], blocks[-1]

        def note_width(_block: Any, _args: tuple, arguments: dict[str, Any]) -> None:
            self.hidden = taken(arguments, next(iter(group.tokens))).shape[-1]

        handles = [first[at].register_forward_pre_hook(note_width, with_kwargs=True)]
        if plan.leaves_behind_blocks:
            handles.append(last[end].register_forward_hook(lambda *_: self.leave(None, None)))
        return handles

    def choose_rows(self, all_tokens: Mapping[str, int]) -> None:
        self.tokens = dict(all_tokens)

    def enter_block(self) -> None:
        self.before.append(self.counts.so_far)
        self.attended.append([])

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        return local_BlC

    def attend(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        skips = kwargs.get("skip_reshape", False)
        self.attended[-1].append(
            Attended(q.shape[2 if skips else 1], heads, q.shape[-1] if skips else q[0, 0].numel() // heads)
        )
        return (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Not an attention that ranks exchange tokens for: all of them have its queries."""
        return (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor | None) -> None:
        self.end = self.counts.so_far

    def whole(self, model: Any, plan: TokenPlan) -> Whole:
        counts = self.counts
        marks = [*(self.before or [(0, 0)]), self.end or counts.so_far]
        block_flops, launches = (
            [after[of] - before[of] for before, after in pairwise(marks)] for of in (0, 1)
        )
        return Whole(
            **vars(model_bytes(model.diffusion_model, plan)),
            block_flops=block_flops,
            around_flops=counts.flops - sum(block_flops),
            activations=Activations(
                counts.memory.peak,
                sorted((size, kernels) for size, kernels in counts.moved.items() if size),
                sum(one.nbytes for one in tree_leaves(self.out) if isinstance(one, torch.Tensor)),
            ),
            attended_by_block=self.attended or [[]],
            tokens=self.tokens,
            hidden=self.hidden,
            block_launches=[*launches, counts.launches - sum(launches)],
        )


def run_recorded(
    model: Any, plan: TokenPlan, arguments: dict[str, Any], mode: QuickFakeMode, recorder: Recorder
) -> None:
    transformer = model.diffusion_model
    with computing_dry(mode, recorder.counts) as counts, ExitStack() as stack:
        counts.memory.leave_out(own_weights(transformer))
        if plan.blocks:
            hooks = TokenHooks(transformer, plan, recorder)
            stack.callback(hooks.detach)
            recorder.told = hooks.told
            hooks.attach()
            for handle in recorder.hooks(transformer, plan):
                stack.callback(handle.remove)
            arguments = hooks.arguments(arguments)
        recorder.out = getattr(transformer, forward_name(transformer))(**arguments)
