"""One patch of an image through the model, with the keys and values of all other patches as they
were last seen.

PipeFusion (arXiv 2405.14430, section 3.2) on a whole model in one process: the plain loop over
(evaluation, patch) that a pipeline of any number of stages has to match. Warm evaluations are whole
and exact.

Legend: B batch, H heads, L all tokens, l tokens carried, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import ModelError
from ...families.plan import TokenPlan
from ...patches import Patch
from ..hooks import TokenHooks, split_heads
from ..shards import Rows


class PatchForward(TokenHooks):
    """Attached to one model. ``reset`` between runs, never inside one."""

    def __init__(self, model: nn.Module, plan: TokenPlan):
        super().__init__(model, plan)
        self._remember_positions(model)
        self._image = plan.leave.stream
        self._buffers: dict[tuple[Hashable, int], torch.Tensor] = {}  # (branch, layer) -> (2, B, H, L, D)
        self._branch: Hashable = None
        self._patch: Patch | None = None
        self._totals: Mapping[str, int] = {}
        self._own = (0, 0)  # image rows of the patch
        self._layer = 0

    def reset(self) -> None:
        self._buffers.clear()
        self._forget_positions()

    @property
    def image_tokens(self) -> int:
        """Of the last evaluation."""
        return self._totals[self._image]

    @property
    def layers(self) -> int:
        """Attentions that patches share, in the last evaluation."""
        return self._layer

    def begin_patch(self, arguments: dict[str, Any], branch: Hashable, patch: Patch | None) -> dict[str, Any]:
        """The arguments of one patch's forward. ``branch`` tells conds apart. Without a patch the
        evaluation is warm: all tokens, and every buffer is filled. The output has all rows, those
        of other patches are zero.
        """
        self._branch, self._patch, self._layer = branch, patch, 0
        return super().begin(arguments)

    def _choose_rows(self, totals: Mapping[str, int]) -> Rows | None:
        self._totals = totals
        patch = self._patch
        if patch is None:
            return None
        self._own = (patch.start, totals[self._image] - patch.start if patch.last else patch.size)
        others = {stream: (0, total if patch.first else 1) for stream, total in totals.items()}
        return Rows(totals, {**others, self._image: self._own})

    def _attend(self, attention: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask=None, *args, **kwargs):
        if not self._shared_attention:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        if args:
            kwargs["attn_precision"] = args[0]  # the only other argument hosts pass by position
        skip_reshape = kwargs.pop("skip_reshape", False)
        dim = q.shape[-1] if skip_reshape else q[0, 0].numel() // heads
        q_BHlD, k_BHlD, v_BHlD = (t if skip_reshape else split_heads(t, dim) for t in (q, k, v))
        layer, self._layer = self._layer, self._layer + 1
        if self._patch is None:
            self._buffers[self._branch, layer] = torch.stack((k_BHlD, v_BHlD))
        else:
            streams = self._streams_of(q_BHlD.shape[2])
            k_BHlD, v_BHlD = self._refreshed(layer, streams, k_BHlD, v_BHlD)
            mask = None if mask is None else self._own_queries(mask, streams)
        return attention(q_BHlD, k_BHlD, v_BHlD, heads, mask, skip_reshape=True, **kwargs)

    def _streams_of(self, rows: int) -> tuple[str, ...]:
        """The streams that attend together, told by how many rows are carried of them."""
        for streams in (self._plan.streams, *((stream,) for stream in self._plan.also_attend_alone)):
            if sum(self._rows.carried[stream][1] for stream in streams) == rows:
                return streams
        raise ModelError(
            f"Attention over {rows} rows fits none of the plan's streams {dict(self._rows.carried)}: this model needs another plan."
        )

    def _refreshed(self, layer: int, streams: tuple[str, ...], k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(2, B, H, L, D): this layer's keys and values with the carried rows overwritten in place,
        anchors left out.
        """
        buffer = self._buffers[self._branch, layer]
        here = there = 0
        for stream in streams:
            start, size = self._rows.carried[stream]
            if stream == self._image or self._patch.first:
                for place, rows in zip(buffer, (k, v), strict=True):
                    place.narrow(2, there + start, size).copy_(rows.narrow(2, here, size))
            here, there = here + size, there + self._totals[stream]
        return buffer

    def _own_queries(self, mask: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        """The rows of a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) whose queries are
        carried.
        """
        total = sum(self._totals[stream] for stream in streams)
        if mask.ndim < 2 or mask.shape[-2] != total:
            return mask
        return self._rows.once(mask, ("queries",), lambda: self._rows.slice(mask, mask.ndim - 2, streams))

    def _left(self, out_BlC: torch.Tensor) -> torch.Tensor | None:
        if self._patch is None:
            return None
        batch, _, channels = out_BlC.shape
        whole = out_BlC.new_zeros(batch, self._totals[self._image], channels)
        whole.narrow(1, *self._own).copy_(out_BlC)
        return whole
