"""Lay the parts that ranks send each other side by side, with few kernels for any number of ranks.

Neighbouring ranks whose parts are of one size are a *run*, which one strided copy moves: 10 heads
of 4 ranks are the runs 3, 3 and 2, 2. A run of a tensor is a view (ranks, *shape of a part).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

Runs = Sequence[torch.Tensor]

# Each part begins at a multiple of it. NCCL copies a part that begins elsewhere than at a multiple
# of 16 byte by byte (its src/device/common_kernel.h, reduceCopy); 128 is a line of a GPU's cache.
ALIGNED_BYTES = 128


def runs_of(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's part of ``tensor``, which is of these ``sizes`` along ``dim``."""
    return [
        tensor.narrow(dim, start, ranks * size).unflatten(dim, (ranks, size)).movedim(dim, 0)
        for start, ranks, size in alike(sizes)
    ]


def alike(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, ranks, size) of neighbouring ranks whose parts are of one size."""
    start = 0
    for size, same in groupby(sizes):
        ranks = len(list(same))
        yield start, ranks, size
        start += ranks * size


def to_all(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return ``tensor`` as the part of each rank."""
    return [tensor.expand(ranks, *tensor.shape)]


def counts_of(tensors: Sequence[Runs]) -> tuple[int, ...]:
    """Return the elements of each rank's part of all ``tensors``, which have like runs."""
    return tuple(
        sum(run.numel() for run in runs) // runs[0].shape[0]
        for runs in zip(*tensors, strict=True)
        for _ in range(runs[0].shape[0])
    )


class Parts(NamedTuple):
    """The parts that lie in ``buffer``. ``sizes``: elements of each, with what fills it up.
    ``flags``: the places of the flags at their ends, (ranks,) by run.
    """

    buffer: torch.Tensor
    sizes: list[int]
    flags: list[torch.Tensor]

    def put(self, tensors: Sequence[Runs]) -> None:
        """Copy each rank's part of all ``tensors``, one after another, to its place."""
        first = 0
        for runs in zip(*tensors, strict=True):
            offset = 0
            for run in runs:
                if run.numel():
                    self._places(first, run.shape, offset).copy_(run)
                offset += run.numel() // run.shape[0]
            first += runs[0].shape[0]

    def take(self, into: Runs) -> None:
        """Copy what came from each rank to its place ``into`` a tensor."""
        first = 0
        for run in into:
            if run.numel():
                run.copy_(self._places(first, run.shape, 0))
            first += run.shape[0]

    def _places(self, first: int, shape: Sequence[int], offset: int) -> torch.Tensor:
        strides = [*accumulate(reversed(shape[2:]), int.__mul__, initial=1)][::-1]
        return self.buffer.as_strided(
            shape,
            (self.sizes[first], *strides),
            self.buffer.storage_offset() + sum(self.sizes[:first]) + offset,
        )


def unit_of(dtype: torch.dtype) -> int:
    """Return the elements between aligned places."""
    return max(1, ALIGNED_BYTES // dtype.itemsize)


def padded(counts: Sequence[int], is_flagged: bool, dtype: torch.dtype) -> list[int]:
    """Return the elements that each rank's part takes, with its flag and what fills it up."""
    unit = unit_of(dtype)
    return [-(-(count + is_flagged) // unit) * unit for count in counts]


def flags_of(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the last element of each rank's part, (ranks,) by run."""
    return [buffer[start + size - 1 : start + ranks * size : size] for start, ranks, size in alike(sizes)]
