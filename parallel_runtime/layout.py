"""The grid of ranks, and how a sequence or a set of heads is split over one axis.

Degrees are what is asked for, sizes what is. Axes, innermost first: ulysses, ring, pipefusion
(later: cfg, data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from .errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the parallel axes."""

    ulysses: int = 1
    ring: int = 1
    pipefusion: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if degree < 1:
                raise LayoutError(f"{axis} {degree} is not a degree: choose 1 or more.")
        if self.pipefusion > 1 and self.ring > 1:
            raise LayoutError(f"pipefusion {self.pipefusion} with ring {self.ring}: within a stage use ulysses, and set ring to 1.")

    def degrees(self) -> dict[str, int]:
        return {"ulysses": self.ulysses, "ring": self.ring, "pipefusion": self.pipefusion}

    @property
    def world_size(self) -> int:
        return self.ulysses * self.ring * self.pipefusion

    @property
    def writer(self) -> int:
        """The rank that has the output: the first of the last stage."""
        return self.ulysses * self.ring * (self.pipefusion - 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """axis -> index of ``rank`` on it; ulysses varies fastest."""
        coordinates = {}
        for axis, degree in self.degrees().items():
            rank, coordinates[axis] = divmod(rank, degree)
        return coordinates

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axis`` alone, in order."""
        here = {key: index for key, index in self.coordinates(rank).items() if key != axis}
        return tuple(other for other in range(self.world_size) if here.items() <= self.coordinates(other).items())

    def mesh(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Every stage: its ulysses groups, in the order of the ring."""
        return tuple(tuple(self.group("ulysses", rank) for rank in self.group("ring", first)) for first in self.group("pipefusion", 0))

    def grid(self, names: Sequence[str] = ()) -> str:
        """A row per ring index, or per stage, its ulysses ranks side by side, each followed by its
        name (for example its device's).
        """
        cells = [f"{rank:3d} {name}".rstrip() for rank, name in zip_longest(range(self.world_size), names, fillvalue="")]
        width = max(map(len, cells))
        axis = "stage" if self.pipefusion > 1 else "ring"
        rows = [" ".join(cells[rank].ljust(width) for rank in row) for stage in self.mesh() for row in stage]
        return "\n".join(f"{axis} {row}: {ranks}".rstrip() for row, ranks in enumerate(rows))

    def equation(self) -> str:
        """For example ``ulysses 4 = 4 ranks``."""
        factors = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees().items() if degree > 1) or "ulysses 1"
        return f"{factors} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True)
class Split:
    """An uneven, contiguous split of ``total`` items over ``parts`` ranks; the first ranks get one
    more.
    """

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, total: int, parts: int) -> Split:
        base, more = divmod(total, parts)
        return cls(tuple(base + (part < more) for part in range(parts)))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]


def clip_ranges(ranges: list, start: int, size: int, offset: int = 0) -> list[tuple]:
    """The parts of ``(begin, end, *rest)`` ranges over rows [start, start + size), renumbered from
    ``offset``.
    """
    clipped = []
    for begin, end, *rest in ranges:
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            clipped.append((low - start + offset, high - start + offset, *rest))
    return clipped
