"""Arrange ranks in a grid of parallel axes, and split a sequence or a set of heads over one axis.

A degree is the number that the user asks for, a size the number that an axis has. Pure arithmetic:
no process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product, takewhile, zip_longest
from math import log2, prod
from operator import mul
from typing import Any, Literal

from .errors import LayoutError


@dataclass(frozen=True)
class Axis:
    """One axis of the grid of ranks.

    ``within``: what the ranks along it share: one ``sequence``, the tokens of which they share out;
    one ``group``, which computes a whole forward; or the ``pool``, so that they belong to groups
    that compute forwards of their own and send each other no messages. ``row`` names a row of the
    printed grid, if ``name`` does not. ``output_at_end``: the output is on its last rank, not its
    first. ``is_approximate``: above 1 the image differs a little. ``merges_parts``: ranks along it
    attend to a part of the keys at a time. ``parts_batches``: the images of a batch go to its
    groups.
    """

    name: str
    within: Literal["sequence", "group", "pool"]
    row: str = ""
    output_at_end: bool = False
    is_approximate: bool = False
    merges_parts: bool = False
    parts_batches: bool = False


AXES = (  # innermost first: ranks that are neighbours on the first are numbered in a row
    Axis("ulysses", "sequence"),
    Axis("ring", "sequence", merges_parts=True),
    Axis("pipefusion", "group", row="stage", output_at_end=True, is_approximate=True),
    Axis("cfg", "pool", row="branch"),
    Axis("data", "pool", parts_batches=True),
)
THAT_MERGE = tuple(axis.name for axis in AXES if axis.merges_parts)
OF_A_SEQUENCE = tuple(axis.name for axis in AXES if axis.within == "sequence")
ALONE = 0  # in place of a width: a rank that computes a whole forward by itself, whatever its group is
OF_A_GROUP = tuple(axis.name for axis in AXES if axis.within != "pool")  # a forward is cut along them
OF_THE_POOL = tuple(axis.name for axis in AXES if axis.within == "pool")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks there are along each axis: a field for each of ``AXES``."""

    ulysses: int = 1
    ring: int = 1
    pipefusion: int = 1
    cfg: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1:
                raise LayoutError(f"{name} {degree} is not a degree: choose 1 or more.")

    def degrees(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    def used(self) -> tuple[Axis, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis in AXES if getattr(self, axis.name) > 1)

    def _along(self, within: str) -> list[int]:
        """The degrees of the axes within that, innermost first."""
        return [getattr(self, axis.name) for axis in AXES if axis.within == within]

    @cached_property  # asked for at every evaluation
    def world_size(self) -> int:
        return prod(self.degrees().values())

    @cached_property
    def sequence_size(self) -> int:
        """The number of ranks that share one sequence."""
        return prod(self._along("sequence"))

    @cached_property
    def group_size(self) -> int:
        """The number of ranks that compute a whole forward together."""
        return self.sequence_size * prod(self._along("group"))

    @cached_property
    def groups(self) -> int:
        return prod(self._along("pool"))

    @property
    def stages(self) -> int:
        """The number of parts that the model's blocks are cut into."""
        return self.pipefusion

    @cached_property
    def parts_of_batches(self) -> int:
        """The number of groups that the images of one batch go to."""
        return prod(getattr(self, axis.name) for axis in AXES if axis.parts_batches)

    @property
    def is_approximate(self) -> bool:
        """Whether the image differs a little from that of one GPU."""
        return any(axis.is_approximate for axis in self.used())

    @property
    def merges_parts(self) -> bool:
        """Whether ranks attend to a part of the keys at a time, and merge the outputs."""
        return any(axis.merges_parts for axis in self.used())

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The numbers of neighbouring groups that can compute a forward as one, smallest first.

        Groups of more than one sequence stay apart: their stages hold different blocks.
        """
        joined = accumulate(self._along("pool"), mul) if self.group_size == self.sequence_size else ()
        return tuple(sorted({1, *joined}))

    def equation(self) -> str:
        """For example ``ulysses 2 x pipefusion 2 = 4 ranks``."""
        return f"{self.product()} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"

    def product(self) -> str:
        """For example ``ulysses 2 x pipefusion 2``."""
        return " x ".join(f"{axis.name} {getattr(self, axis.name)}" for axis in self.used() or AXES[:1])


@dataclass(frozen=True, kw_only=True)
class Layout(Degrees):
    """The ranks of these degrees, numbered so that the ranks of one sequence stand in a row, and
    the ranks of one group too: with ulysses 2 and cfg 2, ranks 0 and 1 are the first sequence.
    """

    def members(self, group: int, width: int = 1) -> tuple[int, ...]:
        """The ranks of a group if each ``width`` neighbouring groups act as one."""
        size = self.group_size * width
        return tuple(range(group * size, (group + 1) * size))

    def joined(self, width: int) -> Layout:
        """The same ranks if each ``width`` neighbouring groups share one sequence. The sequence
        grows along the outermost of its axes in use, so that ranks numbered in a row stay
        neighbours.
        """
        if width == 1:
            return self
        used = [axis.name for axis in self.used() if axis.within == "sequence"] or OF_A_SEQUENCE[:1]
        grown = {used[-1]: getattr(self, used[-1]) * width}
        apart = {**dict.fromkeys(OF_THE_POOL, 1), OF_THE_POOL[-1]: self.groups // width}
        return replace(self, **grown, **apart)

    def writes(self, rank: int) -> bool:
        """Whether ``rank`` has the output of its group."""
        return rank % self.group_size == self.writer

    @cached_property
    def writer(self) -> int:
        """The rank that has the first group's output: the first of the last stage."""
        return sum(
            self._stride(axis.name) * (getattr(self, axis.name) - 1) for axis in AXES if axis.output_at_end
        )

    def _stride(self, axis: str) -> int:
        """How far apart neighbours on ``axis`` are numbered."""
        return prod(getattr(self, inner.name) for inner in takewhile(lambda one: one.name != axis, AXES))

    def coordinates(self, rank: int) -> dict[str, int]:
        """axis -> index of ``rank`` on it."""
        coordinates = {}
        for axis, degree in self.degrees().items():
            rank, coordinates[axis] = divmod(rank, degree)
        return coordinates

    def stage(self, rank: int) -> int:
        return self.coordinates(rank)["pipefusion"]

    def of_stages(self, rank: int) -> tuple[int, ...]:
        """The rank of each stage that has the tokens of ``rank``, in order."""
        return self.group("pipefusion", rank)

    def sequence(self, rank: int) -> range:
        first = rank - rank % self.sequence_size
        return range(first, first + self.sequence_size)

    def sequences(self) -> list[range]:
        return [self.sequence(first) for first in range(0, self.world_size, self.sequence_size)]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axis`` alone, in order."""
        stride, degree = self._stride(axis), getattr(self, axis)
        first = rank - rank // stride % degree * stride
        return tuple(range(first, first + stride * degree, stride))

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks that differ on ``axis`` alone, by their first ranks."""
        return [self.group(axis, rank) for rank in range(self.world_size) if not self.coordinates(rank)[axis]]

    def nearest(self, ranks: int, most: int = 2) -> tuple[Layout, ...]:
        """The layouts of so many ranks that are nearest to this one. If several are equally near,
        layouts of inner axes come first.
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
        inner, *outer = AXES
        used = [axis for axis in outer if axis in self.used()] or outer[:1]
        lines = []
        for ranks in self.lines(inner.name):
            place = self.coordinates(ranks[0])
            row = " ".join(f"{axis.row or axis.name} {place[axis.name]}" for axis in reversed(used))
            lines.append(f"{row}: {' '.join(cells[rank].ljust(width) for rank in ranks)}".rstrip())
        return "\n".join(lines)


def in_one_sequence(ranks: int) -> Layout:
    """Return the layout of so many ranks that share every image."""
    return Layout(**{OF_A_SEQUENCE[0]: ranks})


def in_groups_of_one(ranks: int) -> Layout:
    """Return the layout of so many ranks that compute whole forwards, each its own."""
    return Layout(**{OF_THE_POOL[0]: ranks})


def listed(names: Sequence[str], before_last: str = "and") -> str:
    """For example ``ulysses, ring and pipefusion``."""
    *first, last = names
    return f"{', '.join(first)} {before_last} {last}" if first else last


def layouts_of(ranks: int) -> Iterator[Layout]:
    """Yield every layout of so many ranks: every product of degrees."""
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for degrees in product(divisors, repeat=len(AXES)):
        if prod(degrees) == ranks:
            yield Layout(**{axis.name: degree for axis, degree in zip(AXES, degrees, strict=True)})


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
    @lru_cache(maxsize=64)  # asked for at every attention
    def by(cls, weights: tuple[float, ...], total: int, parts: int, least: int = 0) -> Split:
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

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @cached_property
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
