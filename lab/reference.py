"""PipeFusion (arXiv 2405.14430, section 3.2) on a whole model in one process: the plain loop over
(evaluation, patch) that a pipeline of any number of stages has to match.

A warm evaluation is whole and exact. A patch sees the keys and values of all others as they were
last seen.

Legend: B batch, H heads, L all tokens, l local tokens, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from ..parallel_runtime.errors import ModelError
from ..parallel_runtime.families.plan import TokenPlan
from ..parallel_runtime.methods.hooks import Attention, TokenHooks, split_heads
from ..parallel_runtime.methods.shards import Rows
from ..parallel_runtime.patches import Patch


class PatchForward:
    """One model, evaluated patch by patch between ``attach`` and ``detach``."""

    def __init__(self, model: nn.Module, plan: TokenPlan):
        self._plan = plan
        self._hooks = TokenHooks(model, plan, self)
        self._buffers: dict[tuple[Hashable, int], torch.Tensor] = {}  # (branch, layer) -> (2, B, H, L, D)
        self._branch: Hashable = None
        self._left: dict[Hashable, torch.Tensor] = {}  # branch -> (B, L, C)
        self._patch: Patch | None = None
        self._all_tokens: Mapping[str, int] = {}
        self._layer = 0

    def attach(self) -> None:
        self._hooks.attach()

    def detach(self) -> None:
        self._hooks.detach()

    def end_run(self) -> None:
        self._hooks.end_run()
        self._buffers.clear()
        self._left.clear()

    @property
    def image_tokens(self) -> int:
        """Image tokens of the last evaluation."""
        return self._all_tokens[self._plan.leave.stream]

    @property
    def layers(self) -> int:
        """Attentions that patches share, in the last evaluation."""
        return self._layer

    def forward(
        self, forward: Callable[..., Any], arguments: dict[str, Any], branch: Hashable, patch: Patch | None
    ) -> Any:
        """Run one patch through the model; return all rows of the output, zero in those of other
        patches. ``branch`` tells conds apart.

        Without a patch the evaluation is warm: all tokens, and every buffer is filled.
        """
        self._branch, self._patch, self._layer = branch, patch, 0
        return forward(**self._hooks.arguments(arguments))

    # -- decisions in the middle of a forward

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Rows | None:
        self._all_tokens = all_tokens
        patch, image = self._patch, self._plan.leave.stream
        if patch is None:
            return None
        local = {stream: (0, count if patch.first else 1) for stream, count in all_tokens.items()}
        return Rows(
            all_tokens,
            {**local, image: (patch.start, all_tokens[image] - patch.start if patch.last else patch.size)},
        )

    def enter_block(self) -> None:
        pass

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        raise AssertionError("evaluations with such a patch of a node are whole")

    def attend(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, **kwargs: Any
    ) -> torch.Tensor:
        skip_reshape = kwargs.pop("skip_reshape", False)
        dim = q.shape[-1] if skip_reshape else q[0, 0].numel() // heads
        q_BHlD, k_BHlD, v_BHlD = (t if skip_reshape else split_heads(t, dim) for t in (q, k, v))
        layer, self._layer = self._layer, self._layer + 1
        if rows is None:
            self._buffers[self._branch, layer] = torch.stack((k_BHlD, v_BHlD))
        else:
            streams = streams_of(self._plan, rows, q_BHlD.shape[2])
            k_BHlD, v_BHlD = self._refreshed(layer, rows, streams, k_BHlD, v_BHlD)
            mask = None if mask is None else mask_of_patch(mask, rows, streams)
        return attention(q_BHlD, k_BHlD, v_BHlD, heads, mask, skip_reshape=True, **kwargs)

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, **kwargs: Any
    ) -> torch.Tensor:
        assert rows is None, "a plan with whole queries says why its evaluations are whole"
        return attention(q, k, v, heads, mask, **kwargs)

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor | None:
        if rows is None:
            return None
        batch, _, channels = out_BlC.shape
        whole = self._left.get(self._branch)
        if whole is None or not self._plan.leaves_behind_blocks or whole.shape[1] != self.image_tokens:
            whole = out_BlC.new_zeros(batch, self.image_tokens, channels)
        whole.narrow(1, *rows.local[self._plan.leave.stream]).copy_(out_BlC)
        self._left[self._branch] = whole
        return whole.clone()

    def _refreshed(
        self, layer: int, rows: Rows, streams: tuple[str, ...], k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """(2, B, H, L, D): overwrite the local rows of this layer's keys and values, anchors left
        out; return all of them.
        """
        assert self._patch is not None
        buffer = self._buffers[self._branch, layer]
        here = there = 0
        for stream in streams:
            start, size = rows.local[stream]
            if stream == self._plan.leave.stream or self._patch.first:
                for place, new in zip(buffer, (k, v), strict=True):
                    place.narrow(2, there + start, size).copy_(new.narrow(2, here, size))
            here, there = here + size, there + rows.all_tokens[stream]
        return buffer


def streams_of(plan: TokenPlan, rows: Rows, count: int) -> tuple[str, ...]:
    """Return the streams that attend together, told by how many local rows they have."""
    for streams in (plan.streams, *((stream,) for stream in plan.also_attend_alone)):
        if sum(rows.local[stream][1] for stream in streams) == count:
            return streams
    raise ModelError(
        f"Attention over {count} rows fits none of the plan's streams {dict(rows.local)}: this model needs"
        " another plan."
    )


def mask_of_patch(mask: torch.Tensor, rows: Rows, streams: tuple[str, ...]) -> torch.Tensor:
    """Return the rows of a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) whose queries are
    local.
    """
    total = sum(rows.all_tokens[stream] for stream in streams)
    if mask.ndim < 2 or mask.shape[-2] != total:
        return mask
    return rows.memoise(mask, ("queries",), lambda: rows.slice(mask, mask.ndim - 2, streams))
