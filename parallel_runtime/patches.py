"""Cut an image or a video into patches: contiguous runs of token lines, and the latent pixels they
stand for.

A line is one row of tokens of one frame. Tokens come frame by frame, row by row, as every family
here has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from .layout import Split


@dataclass(frozen=True)
class Patch:
    """Image tokens [start, start + size). The first patch carries the text as well, the last also
    the tokens that the host puts behind the image (reference latents).

    The other patches carry one text token as an anchor: host blocks cannot view an empty stream.
    Its keys and values are not used.
    """

    start: int
    size: int
    last: bool

    @property
    def first(self) -> bool:
        return self.start == 0


class Part(NamedTuple):
    """The part of an evaluation that one request computes. ``run`` and ``branch`` (cond, uncond)
    say which K/V buffers it uses; ranks keep those of one run at a time. ``attempt``: how many
    evaluations of the run failed so far; data that a failed one left on some ranks is void.

    ``patch``: (start, size, last) of its image tokens, None for all tokens.
    """

    run: int
    branch: int
    patch: tuple[int, int, bool] | None = None
    attempt: int = 0


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a latent (B, C, H, W) or (B, C, T, H, W): ``extent`` is its size in pixels
    without B and C, ``edges`` that of the box each token stands for. The host pads.
    """

    extent: tuple[int, ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], patch_size: int | Sequence[int]) -> TokenGrid:
        """Take the latent's shape and a host model's ``patch_size``, of the last two dimensions or
        of all.
        """
        extent = tuple(shape[2:])
        sizes = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        return cls(extent, (1,) * (len(extent) - len(sizes)) + sizes[-len(extent) :])

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens along each dimension."""
        return tuple(-(-size // edge) for size, edge in zip(self.extent, self.edges, strict=True))

    @property
    def tokens(self) -> int:
        return prod(self.counts)

    @property
    def lines(self) -> int:
        return prod(self.counts[:-1])

    def cut(self, patches: int, ahead: int = 0) -> tuple[Patch, ...]:
        """Cut the grid into ``patches`` of whole lines, as even as possible; fewer if there are
        fewer lines.

        ``ahead`` counts other tokens that are computed with the first patch, such as a prompt's.
        The first patch is made shorter by as many, because every stage waits for the longest patch.
        """
        count, width = min(self.lines, patches), self.counts[-1]
        extra = round(ahead / width)
        first = max(1, -(-(self.lines + extra) // count) - extra)
        sizes = (first, *(Split.even(self.lines - first, count - 1).sizes if count > 1 else ()))
        starts = accumulate(sizes, initial=0)
        return tuple(
            Patch(start * width, size * width, start + size == self.lines)
            for start, size in zip(starts, sizes, strict=False)
        )

    def pixels(self, patch: Patch) -> torch.Tensor:
        """Return a mask (..., H, 1), True in the latent's rows that belong to the patch."""
        width = self.counts[-1]
        lines = torch.zeros(self.lines, dtype=torch.bool)
        lines[patch.start // width : (patch.start + patch.size) // width] = True
        rows = lines.view(self.counts[:-1])
        for dim, edge in enumerate(self.edges[:-1]):
            rows = rows.repeat_interleave(edge, dim)
        return rows[tuple(slice(size) for size in self.extent[:-1])].unsqueeze(-1)


def assembled(outputs: Sequence[torch.Tensor], last_seen: bool) -> torch.Tensor:
    """Make one output from the outputs of all patches of an evaluation, in their order. With
    ``last_seen`` an output has last seen rows outside its patch, so the last output has all rows;
    else it has zeros there.
    """
    return outputs[-1] if last_seen else sum(outputs[1:], outputs[0])
