"""Arrange ranks in a grid of parallel axes, and split a sequence or a set of heads over one axis.

Degrees are what is asked for, sizes what is. Pure arithmetic: no process group is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from math import prod
from typing import Any

from .errors import LayoutError


def axis(*, row: str = "", output_at_end: bool = False) -> Any:
    """Declare an axis of Layout. ``row`` names a row of the printed grid, where that is not the
    axis's own name. ``output_at_end``: the output is on its last rank, not its first.
    """
    return field(default=1, metadata={"row": row, "output_at_end": output_at_end})


EXCLUSIVE = {("pipefusion", "ring"): "within a stage use ulysses, and set ring to 1"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the parallel axes. One field per axis, innermost first: ranks that are neighbours
    on the first are numbered in a row.
    """

    ulysses: int = axis()
    ring: int = axis()
    pipefusion: int = axis(row="stage", output_at_end=True)

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1:
                raise LayoutError(f"{name} {degree} is not a degree: choose 1 or more.")
        for (one, other), instead in EXCLUSIVE.items():
            if self.degrees()[one] > 1 and self.degrees()[other] > 1:
                raise LayoutError(f"{one} {self.degrees()[one]} with {other} {self.degrees()[other]}: {instead}.")

    def degrees(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    @property
    def world_size(self) -> int:
        return prod(self.degrees().values())

    @property
    def writer(self) -> int:
        """The rank that has the output: the first of the last stage."""
        rank, stride = 0, 1
        for axis in fields(self):
            degree = getattr(self, axis.name)
            rank += stride * (degree - 1) * axis.metadata["output_at_end"]
            stride *= degree
        return rank

    def coordinates(self, rank: int) -> dict[str, int]:
        """axis -> index of ``rank`` on it."""
        coordinates = {}
        for axis, degree in self.degrees().items():
            rank, coordinates[axis] = divmod(rank, degree)
        return coordinates

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axis`` alone, in order."""
        here = {key: index for key, index in self.coordinates(rank).items() if key != axis}
        return tuple(other for other in range(self.world_size) if here.items() <= self.coordinates(other).items())

    def grid(self, names: Sequence[str] = ()) -> str:
        """Print the ranks, one line for each group of the first axis, each rank followed by its
        name (for example its device's).
        """
        cells = [f"{rank:3d} {name}".rstrip() for rank, name in zip_longest(range(self.world_size), names, fillvalue="")]
        width = max(map(len, cells))
        inner, *outer = fields(self)
        used = [axis for axis in outer if getattr(self, axis.name) > 1] or outer[:1]
        lines = []
        for first in range(0, self.world_size, getattr(self, inner.name)):
            place = self.coordinates(first)
            row = " ".join(f"{axis.metadata['row'] or axis.name} {place[axis.name]}" for axis in reversed(used))
            ranks = " ".join(cells[rank].ljust(width) for rank in self.group(inner.name, first))
            lines.append(f"{row}: {ranks}".rstrip())
        return "\n".join(lines)

    def equation(self) -> str:
        """For example ``ulysses 2 x ring 2 = 4 ranks``."""
        degrees = self.degrees()
        factors = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1] or [f"{next(iter(degrees))} 1"]
        return f"{' x '.join(factors)} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True)
class Split:
    """Contiguous parts of a sequence of items, one for each rank."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, total: int, parts: int) -> Split:
        """Split ``total`` items as evenly as they go; the first ranks get one more."""
        base, more = divmod(total, parts)
        return cls(tuple(base + (part < more) for part in range(parts)))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]


def clip_ranges(ranges: list, start: int, size: int, offset: int = 0) -> list[tuple]:
    """Cut ``(begin, end, *rest)`` ranges to the rows [start, start + size), which are numbered from
    ``offset`` in the result.
    """
    clipped = []
    for begin, end, *rest in ranges:
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            clipped.append((low - start + offset, high - start + offset, *rest))
    return clipped
