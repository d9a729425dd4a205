"""Keep the keys and values of all tokens as they were last seen: stale for every patch but the one
at hand.

Legend: B batch, h heads of one rank, L tokens kept by it: all, or those of its place on a ring; g
tokens that are written, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...errors import ModelError
from ...patches import Part
from .kept_rows import Piece


class KVBuffers:
    """Keeps, for one run, a buffer (2, B, h, L, D) for each branch and layer. If the model needs
    all leaving rows, it keeps a buffer of those rows too.
    """

    def __init__(self):
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._left: dict[int, torch.Tensor] = {}
        self._filled: set[int] = set()  # branches that had an evaluation of all tokens in this run
        self._part = Part(0, 0)
        self._layer = 0
        self.is_new = False  # whether this branch has no buffers yet

    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self._buffers.values(), *self._left.values()))

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

    def update(
        self, layer: int, kv: Sequence[torch.Tensor] | torch.Tensor, pieces: Iterable[Piece], tokens: int
    ) -> torch.Tensor:
        """Write ``pieces`` of keys and values 2 x (B, h, g, D) into the ``tokens`` rows of a layer;
        return its whole buffer (2, B, h, L, D).
        """
        buffer = self._buffer(layer, kv[0], tokens)
        for here, there, size in pieces:
            for place, new in zip(buffer, kv, strict=True):
                place.narrow(2, there, size).copy_(new.narrow(2, here, size))
        return buffer

    def leave(self, rows_BlC: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
        """Return (B, tokens, C): the leaving rows of all patches, each in its newest version. The
        rows at ``start`` are new.
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
                raise ModelError(
                    f"A patch attends over {tokens} tokens, which its first evaluation did not: set"
                    " pipefusion to 1."
                )
            buffer = self._buffers[self._part.branch, layer] = like.new_empty(shape)
        return buffer
