"""Keep the keys and values of all tokens as they were last seen: stale for every patch but the one
at hand.

Legend: B batch, h heads of one rank, L all tokens, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ModelError
from ...patches import Part


class KVBuffers:
    """One buffer (2, B, h, L, D) per branch and layer, for one run; and one of the rows that leave,
    where the model goes on with all of them.
    """

    def __init__(self):
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._left: dict[int, torch.Tensor] = {}
        self._filled: set[int] = set()  # branches that had an evaluation of all tokens in this run
        self._part = Part(0, 0)
        self._layer = 0
        self.is_new = False  # whether this branch has no buffers yet

    def start(self, part: Part) -> None:
        """Begin a forward, at the first layer. Raises ModelError for a patch of a branch that had
        no evaluation of all tokens.
        """
        self._part, self._layer = part, 0
        self.is_new = part.branch not in self._filled
        if part.patch is None:
            self._filled.add(part.branch)
        elif self.is_new:
            raise ModelError("A patch came before the first evaluation of its branch: run again.")

    def next_layer(self) -> int:
        layer, self._layer = self._layer, self._layer + 1
        return layer

    def update(self, layer: int, kv: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int]], tokens: int) -> torch.Tensor:
        """Write keys and values 2 x (B, h, g, D) over the rows ``ranges``, (begin, size) of
        ``tokens``; return the whole buffer.
        """
        buffer = self._buffer(layer, kv[0], tokens)
        at = 0
        for begin, size in ranges:
            for place, new in zip(buffer, kv, strict=True):
                place.narrow(2, begin, size).copy_(new.narrow(2, at, size))
            at += size
        return buffer

    def leave(self, rows_BlC: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
        """Return (B, L, C): the leaving rows of all patches as they were last seen, those at
        ``start`` new.
        """
        batch, count, channels = rows_BlC.shape
        kept = self._left.get(self._part.branch)
        if kept is None or kept.shape != (batch, tokens, channels) or kept.dtype != rows_BlC.dtype:
            kept = self._left[self._part.branch] = rows_BlC.new_zeros(batch, tokens, channels)
        kept.narrow(1, start, count).copy_(rows_BlC)
        return kept.clone()

    def _buffer(self, layer: int, like: torch.Tensor, tokens: int) -> torch.Tensor:
        shape = (2, *like.shape[:2], tokens, like.shape[3])
        buffer = self._buffers.get((self._part.branch, layer))
        if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype:
            if self._part.patch is not None:
                raise ModelError(f"A patch attends over {tokens} tokens, which its first evaluation did not: set pipefusion to 1.")
            buffer = self._buffers[self._part.branch, layer] = like.new_empty(shape)
        return buffer

    def end_run(self) -> None:
        self._buffers.clear()
        self._left.clear()
        self._filled.clear()
