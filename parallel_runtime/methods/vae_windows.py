"""A VAE's attention within windows of rows and columns, by bands that may begin amid a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..comm.bands import ROWS
from ..comm.rows import RowExchange

ModuleForward = Callable[..., torch.Tensor]
NEEDED = ("q", "k", "v", "proj_out", "patch_size")


class Windows:
    """Windows of as many rows as columns, the last ones less, in the picture (B, C, R, W) of an
    attention ``block``. Its forward is given all rows of the windows that the band's rows are in,
    with queries of the band's alone. ``is_alone``: whether one rank has all rows.
    """

    def __init__(self, block: Any, rows: RowExchange, is_alone: Callable[[], bool]):
        self._block, self._rows, self._is_alone = block, rows, is_alone
        self._side: int = block.patch_size
        self._inside = slice(0)  # the band's rows, of the first window's on

    def hooks(self) -> list[tuple[Any, str, Callable[..., torch.Tensor]]]:
        """Return the hooks: module, name of the attribute, and the function that replaces it."""
        block = self._block
        return [
            (block.q, "forward", self.query),
            (block.k, "forward", self.key),
            (block.v, "forward", self.key),
            (block, "optimized_attention", self.attend),
            (block.proj_out, "forward", self.project),
        ]

    def query(self, _conv: Any, own: ModuleForward, x: torch.Tensor) -> torch.Tensor:
        q = own(x)
        if self._is_alone():
            return q
        start, end, total = self._rows.place(x.shape[ROWS])
        first = start - start % self._side
        self._inside = slice(start - first, end - first)
        return F.pad(q, (0, 0, start - first, min(total, end - end % -self._side) - end))

    def key(self, _conv: Any, own: ModuleForward, x: torch.Tensor) -> torch.Tensor:
        k = own(x)
        if self._is_alone():
            return k
        start, end, _total = self._rows.place(x.shape[ROWS])
        every = self._rows.every(k.movedim(ROWS, 0).contiguous())
        return every[start - start % self._side : end - end % -self._side].movedim(0, ROWS)

    def attend(self, _block: Any, own: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
        """Attend within windows (N, C, R * W). Where the band is in one row of them, only from its
        own rows.
        """
        if self._is_alone() or self._inside.stop > self._side:
            return own(*qkv)
        rows, *kv = qkv
        rows = rows.unflatten(-1, (self._side, self._side))
        part = rows[:, :, self._inside].flatten(2)
        q, k, v = (one.transpose(1, 2).unsqueeze(1).contiguous() for one in (part, *kv))
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        every = torch.zeros_like(rows)
        every[:, :, self._inside] = out.unflatten(-1, (-1, self._side))
        return every.flatten(2)

    def project(self, _conv: Any, own: ModuleForward, x: torch.Tensor) -> torch.Tensor:
        return own(x if self._is_alone() else x[..., self._inside, :])
