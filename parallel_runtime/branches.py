"""Share out the branches of evaluations (cond, uncond) and the images of a batch over groups of
ranks, so that the groups finish together. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .layout import Split

SEQUENCE_COST = 1.1  # what a forward costs where groups share its sequence, over what it costs in one of them


class Batch(NamedTuple):
    """The rows of one evaluation: those of each of ``branches`` one after another, ``items`` of
    them, at a cost of ``weight`` each.
    """

    branches: int
    items: int
    weight: float

    @property
    def rows(self) -> int:
        return self.branches * self.items

    def pieces(self, parts: int) -> list[tuple[int, int]]:
        """Cut every branch into ``parts``, fewer where it has fewer rows: (start, end) of each."""
        split = Split.even(self.items, min(parts, self.items))
        within = list(zip(split.starts, split.sizes, strict=True))
        starts = range(0, self.rows, self.items)
        return [(first + start, first + start + size) for first in starts for start, size in within]


class Share(NamedTuple):
    """Rows [start, end) of one evaluation, which are all of one branch, and their group."""

    evaluation: int
    start: int
    end: int
    group: int


@dataclass(frozen=True)
class BranchPlan:
    """Names the group of every row. ``width``: so many neighbouring groups are one, and share a
    sequence; ``shares`` in the order of the rows.
    """

    width: int
    shares: tuple[Share, ...]


def plan_branches(batches: Sequence[Batch], groups: int, widths: Sequence[int] = (1,)) -> BranchPlan:
    """Share out all rows so that the last group ends as early as can be, as far as the longest
    piece first tells. Branches stay whole where pieces of them gain nothing, and groups apart.

    ``widths``: the numbers of groups that can be one, smallest first.
    """
    pieces = min(groups, max(batch.items for batch in batches))
    plans = [planned(batches, groups, width, parts) for width in widths for parts in range(1, pieces + 1)]
    return min(plans, key=lambda plan: round(cost_of(plan, batches), 9))


def planned(batches: Sequence[Batch], groups: int, width: int, parts: int) -> BranchPlan:
    """Cut every branch into ``parts``, and give the longest piece to the group with least so far,
    then the next.
    """
    pieces = [(number, start, end) for number, batch in enumerate(batches) for start, end in batch.pieces(parts)]
    loads = [0.0] * (groups // width)
    shares = []
    for number, start, end in sorted(pieces, key=lambda piece: -batches[piece[0]].weight * (piece[2] - piece[1])):
        group = loads.index(min(loads))
        loads[group] += batches[number].weight * (end - start)
        shares.append(Share(number, start, end, group))
    return BranchPlan(width, tuple(sorted(shares)))


def cost_of(plan: BranchPlan, batches: Sequence[Batch]) -> float:
    """Return what the group with most costs."""
    loads: dict[int, float] = {}
    for number, start, end, group in plan.shares:
        loads[group] = loads.get(group, 0.0) + batches[number].weight * (end - start)
    return max(loads.values()) / plan.width * (SEQUENCE_COST if plan.width > 1 else 1.0)
