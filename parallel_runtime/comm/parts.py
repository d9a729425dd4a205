"""Lay the parts that ranks send each other side by side, with few kernels for any number of ranks.

Neighbouring ranks whose parts are of one size are a *run*, which one strided copy moves: 10 heads
of 4 ranks are the runs 3, 3 and 2, 2. A run of a tensor is a view (ranks, *shape of a part).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

TensorRuns = Sequence[torch.Tensor]

# Each part begins at a multiple of it. NCCL copies a part that begins elsewhere than at a multiple
# of 16 byte by byte (its src/device/common_kernel.h, reduceCopy); 128 is a line of a GPU's cache.
ALIGNED_BYTES = 128


def runs_of(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's part of ``tensor``, which is of these ``sizes`` along ``dim``."""
    shape, strides, origin = tensor.shape, tensor.stride(), tensor.storage_offset()
    return [
        tensor.as_strided(
            (ranks, *shape[:dim], size, *shape[dim + 1 :]),
            (size * strides[dim], *strides),
            origin + start * strides[dim],
        )
        for start, ranks, size in alike(tuple(sizes))
    ]


@lru_cache(maxsize=64)  # asked for at every attention
def alike(sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return (start, ranks, size) of neighbouring ranks whose parts are of one size."""
    found, start = [], 0
    for size, same in groupby(sizes):
        ranks = len(list(same))
        found.append((start, ranks, size))
        start += ranks * size
    return tuple(found)


def to_all(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return ``tensor`` as the part of each rank."""
    return [tensor.expand(ranks, *tensor.shape)]


def counts_of(tensors: Sequence[TensorRuns]) -> tuple[int, ...]:
    """Return the elements of each rank's part of all ``tensors``, which have like runs."""
    counts: list[int] = []
    for runs in zip(*tensors, strict=True):
        ranks = runs[0].shape[0]
        counts += [sum(run.numel() for run in runs) // ranks] * ranks
    return tuple(counts)


class Parts(NamedTuple):
    """The parts of a message in ``buffer``. ``sizes``: the elements of each with its padding.
    ``flags``: views of the flags at the ends of the parts, (ranks,) for each run. ``views``: those
    of runs that were asked for.
    """

    buffer: torch.Tensor
    sizes: list[int]
    flags: list[torch.Tensor]
    views: dict[tuple[int, torch.Size, int], torch.Tensor]

    def put(self, tensors: Sequence[TensorRuns]) -> None:
        """Copy each rank's part of all ``tensors``, one after another, to its place.

        CUDA's ``cat`` moves several tensors by one kernel, gaps or not, if they have at most four
        dimensions, so only with one image (cuda/Shape.cu, cat_out_cuda @ torch 2.11).
        """
        first = 0
        for runs in zip(*tensors, strict=True):
            offset, (ranks, *shape) = 0, runs[0].shape
            if len(runs) > 1 and shape[0] == 1 and runs[0].numel() and len({run.shape for run in runs}) == 1:
                whole = torch.Size((ranks, len(runs) * shape[1], *shape[2:]))
                torch.cat([run.squeeze(1) for run in runs], 1, out=self._places(first, whole, 0))
            else:
                for run in runs:
                    if run.numel():
                        self._places(first, run.shape, offset).copy_(run)
                    offset += run.numel() // ranks
            first += ranks

    def take(self, into: TensorRuns) -> None:
        """Copy each rank's received part to its place of ``into``."""
        first = 0
        for run in into:
            if run.numel():
                run.copy_(self._places(first, run.shape, 0))
            first += run.shape[0]

    def _places(self, first: int, shape: torch.Size, offset: int) -> torch.Tensor:
        key = first, shape, offset
        if key not in self.views:
            strides = [*accumulate(reversed(shape[2:]), int.__mul__, initial=1)][::-1]
            origin = self.buffer.storage_offset() + sum(self.sizes[:first]) + offset
            self.views[key] = self.buffer.as_strided(shape, (self.sizes[first], *strides), origin)
        return self.views[key]

    def at(self, buffer: torch.Tensor) -> Parts:
        return Parts(buffer, self.sizes, flags_of(buffer, self.sizes) if self.flags else [], {})


def unit_of(dtype: torch.dtype) -> int:
    """Return the elements between aligned places."""
    return max(1, ALIGNED_BYTES // dtype.itemsize)


def padded(counts: Sequence[int], is_flagged: bool, dtype: torch.dtype) -> list[int]:
    """Return the elements of each rank's part, with its flag and the padding."""
    unit = unit_of(dtype)
    return [-(-(count + is_flagged) // unit) * unit for count in counts]


def flags_of(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the last element of each rank's part, (ranks,) by run."""
    return [
        buffer[start + size - 1 : start + ranks * size : size] for start, ranks, size in alike(tuple(sizes))
    ]
