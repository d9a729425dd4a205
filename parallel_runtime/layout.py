"""The grid of ranks, and how a sequence or a set of heads is split over one axis.

Degrees are what is asked for, sizes what is. Axes, innermost first: ulysses (later: ring, pipefusion, cfg, data).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from .errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the parallel axes."""

    ulysses: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if degree < 1:
                raise LayoutError(f"{axis} {degree} is not a degree: choose 1 or more.")

    def degrees(self) -> dict[str, int]:
        return {"ulysses": self.ulysses}

    @property
    def world_size(self) -> int:
        return self.ulysses

    def equation(self) -> str:
        """For example ``ulysses 4 = 4 ranks``."""
        factors = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees().items() if degree > 1) or "ulysses 1"
        return f"{factors} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True)
class Split:
    """An uneven, contiguous split of ``total`` items over ``parts`` ranks; the first ranks get one more."""

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

    def carried(self, part: int) -> tuple[int, int]:
        """(start, size) of the rows a rank computes. A rank that owns none carries row 0 as an anchor, because
        host blocks cannot view a zero-length stream; anchors never take part in attention or in the result."""
        return (self.starts[part], self.sizes[part]) if self.sizes[part] else (0, min(1, self.total))


def clip_ranges(ranges: list, start: int, size: int, offset: int = 0) -> list[tuple]:
    """The parts of ``(begin, end, *rest)`` ranges over rows [start, start + size), renumbered from ``offset``."""
    clipped = []
    for begin, end, *rest in ranges:
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            clipped.append((low - start + offset, high - start + offset, *rest))
    return clipped
