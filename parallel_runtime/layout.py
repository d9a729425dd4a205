"""Arrange ranks in a grid of parallel axes, and split a sequence or a set of heads over one axis.

Degrees are what is asked for, sizes what is. Pure arithmetic: no process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, product, zip_longest
from math import log2, prod
from typing import Any

from .errors import LayoutError


def axis(*, row: str = "", output_at_end: bool = False, of_groups: bool = False) -> Any:
    """Declare an axis of Layout. ``row`` names a row of the printed grid, where that is not the
    axis's own name. ``output_at_end``: the output is on its last rank, not its first.
    ``of_groups``: ranks along it belong to groups that compute whole forwards of their own.
    """
    return field(default=1, metadata={"row": row, "output_at_end": output_at_end, "of_groups": of_groups})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the parallel axes. One field per axis, innermost first: ranks that are neighbours
    on the first are numbered in a row.

    A group is a place on the ``of_groups`` axes: its ranks, which are numbered in a row, compute a
    whole forward together.
    """

    ulysses: int = axis()
    ring: int = axis()
    pipefusion: int = axis(row="stage", output_at_end=True)
    cfg: int = axis(row="branch", of_groups=True)
    data: int = axis(of_groups=True)

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1:
                raise LayoutError(f"{name} {degree} is not a degree: choose 1 or more.")

    def degrees(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    @cached_property  # asked for at every evaluation
    def world_size(self) -> int:
        return prod(self.degrees().values())

    @cached_property
    def groups(self) -> int:
        """The number of groups."""
        return prod(getattr(self, axis.name) for axis in fields(self) if axis.metadata["of_groups"])

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of neighbouring groups that can compute a forward as one, smallest first.

        Stages hold different blocks, so the groups of pipelines stay apart.
        """
        return tuple(sorted({1, self.cfg, self.groups})) if self.pipefusion == 1 else (1,)

    def members(self, group: int, width: int = 1) -> tuple[int, ...]:
        """The ranks of a group, where each ``width`` neighbouring groups are one."""
        size = self.world_size // self.groups * width
        return tuple(range(group * size, (group + 1) * size))

    def joined(self, width: int) -> Layout:
        """The same ranks where each ``width`` neighbouring groups share one sequence: along the
        ring, where there is one. So ranks that are numbered in a row stay neighbours.
        """
        if width == 1:
            return self
        ulysses, ring = (self.ulysses, self.ring * width) if self.ring > 1 else (self.ulysses * width, 1)
        return Layout(ulysses=ulysses, ring=ring, pipefusion=self.pipefusion, data=self.groups // width)

    def writes(self, rank: int) -> bool:
        """Whether ``rank`` has the output of its group."""
        return rank % (self.world_size // self.groups) == self.writer

    @cached_property
    def writer(self) -> int:
        """The rank that has the first group's output: the first of the last stage."""
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
        return tuple(
            other for other in range(self.world_size) if here.items() <= self.coordinates(other).items()
        )

    def nearest(self, ranks: int, most: int = 2) -> tuple[Layout, ...]:
        """The layouts of so many ranks that are nearest to this one; of equally near ones,
        those of inner axes.
        """
        asked = self.degrees().values()

        def distance(layout: Layout) -> tuple[float, tuple[int, ...]]:
            degrees = tuple(layout.degrees().values())
            return round(
                sum(abs(log2(here / there)) for here, there in zip(degrees, asked, strict=True)), 6
            ), degrees[::-1]

        return tuple(sorted(layouts_of(ranks), key=distance)[:most])

    def grid(self, names: Sequence[str] = ()) -> str:
        """Print the ranks, one line for each group of the first axis, each rank followed by its
        name (for example its device's).
        """
        cells = [
            f"{rank:3d} {name}".rstrip()
            for rank, name in zip_longest(range(self.world_size), names, fillvalue="")
        ]
        width = max(map(len, cells))
        inner, *outer = fields(self)
        used = [axis for axis in outer if getattr(self, axis.name) > 1] or outer[:1]
        lines = []
        for first in range(0, self.world_size, getattr(self, inner.name)):
            place = self.coordinates(first)
            row = " ".join(
                f"{axis.metadata['row'] or axis.name} {place[axis.name]}" for axis in reversed(used)
            )
            ranks = " ".join(cells[rank].ljust(width) for rank in self.group(inner.name, first))
            lines.append(f"{row}: {ranks}".rstrip())
        return "\n".join(lines)

    def equation(self) -> str:
        """For example ``ulysses 2 x ring 2 = 4 ranks``."""
        return f"{self.product()} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"

    def product(self) -> str:
        """For example ``ulysses 2 x ring 2``."""
        degrees = self.degrees()
        factors = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1] or [
            f"{next(iter(degrees))} 1"
        ]
        return " x ".join(factors)


def layouts_of(ranks: int) -> Iterator[Layout]:
    """Yield every layout of so many ranks: every product of degrees."""
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for degrees in product(divisors, repeat=len(fields(Layout))):
        if prod(degrees) == ranks:
            yield Layout(**dict(zip((axis.name for axis in fields(Layout)), degrees, strict=True)))


@dataclass(frozen=True)
class Split:
    """Contiguous parts of a sequence of items, one for each rank."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, total: int, parts: int) -> Split:
        """Split ``total`` items as evenly as they go; the first ranks get one more."""
        base, more = divmod(total, parts)
        return cls(tuple(base + (part < more) for part in range(parts)))

    @classmethod
    def by(cls, weights: Sequence[float], total: int, parts: int, least: int = 0) -> Split:
        """Split ``total`` items so that the largest part, for its weight, is as small as can be.
        No weights, or equal ones, split evenly. Each part has ``least`` where there are as many.
        """
        if not weights:
            return cls.even(total, parts)
        least = least if total >= parts * least else 0
        sizes = [max(least, int((total - parts * least) * weight / sum(weights))) for weight in weights]
        for _ in range(total - sum(sizes)):
            sizes[min(range(parts), key=lambda part: ((sizes[part] + 1) / weights[part], sizes[part]))] += 1
        return cls(tuple(sizes))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]


def clip_ranges(
    ranges: list,
    start: int,
    size: int,
    offset: int = 0,
    part_of: Callable[[Any, int, int], Any] = lambda entry, first, last: entry,
) -> list[tuple]:
    """Cut ``(begin, end, *rest)`` ranges to the rows [start, start + size), which are numbered from
    ``offset`` in the result. ``part_of``: what an entry of the rest is for the rows from ``first``
    to ``last`` of its range.
    """
    clipped = []
    for begin, end, *rest in ranges:
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            kept = (part_of(entry, low - begin, high - begin) for entry in rest)
            clipped.append((low - start + offset, high - start + offset, *kept))
    return clipped
