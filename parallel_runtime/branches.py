"""Share out the branches of evaluations (cond, uncond) and the images of a batch over groups of
ranks, so that the groups finish together. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from .layout import Split

SEQUENCE_COST = 1.1  # what a forward costs where groups share its sequence, over what it costs in one of them


class Batch(NamedTuple):
    """The rows of one evaluation: first all rows of one branch, then of the next. Each of
    ``branches`` has ``items`` rows, at a cost of ``weight`` each. With ``together``, the rows of a
    branch are not cut. Example: 2 branches of 3 images are 6 rows; rows 0 to 2 are the first
    branch's.
    """

    branches: int
    items: int
    weight: float
    together: bool = False

    @property
    def rows(self) -> int:
        return self.branches * self.items

    def pieces(self, parts: int, weights: Sequence[float] = ()) -> list[tuple[int, int]]:
        """Cut every branch into ``parts``, in proportion to ``weights`` if they are given, fewer if
        it has fewer rows. Returns (start, end) of each piece.
        """
        if self.together:
            parts, weights = 1, ()
        split = Split.by(tuple(weights), self.items, parts if weights else min(parts, self.items))
        within = [(start, size) for start, size in zip(split.starts, split.sizes, strict=True) if size]
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
    """Names the group of every row. ``width``: how many neighbouring groups compute an evaluation
    together, as one longer sequence; ``shares`` in the order of the rows.
    """

    width: int
    shares: tuple[Share, ...]


def plan_branches(
    batches: Sequence[Batch], groups: int, widths: Sequence[int] = (1,), speeds: Sequence[float] = ()
) -> BranchPlan:
    """Share out all rows so that the last group ends early, by giving out the longest piece first.
    Branches stay whole, and groups apart, if a split gains nothing.

    ``widths``: how many groups can join into one, smallest first. ``speeds`` of the groups; empty
    if all are alike.
    """
    pieces = min(groups, max(batch.items for batch in batches))
    plans = []
    for width in widths:
        own = joined(speeds, width)
        plans += [planned(batches, groups, width, parts, own) for parts in range(1, pieces + 1)]
        plans += [planned(batches, groups, width, len(own), own, own)] if own else []
    return min(plans, key=lambda plan: round(cost_of(plan, batches, speeds), 9))


def joined(speeds: Sequence[float], width: int) -> list[float]:
    """Return the speeds of wider groups, each made of ``width`` neighbouring groups."""
    return [sum(speeds[first : first + width]) for first in range(0, len(speeds), width)]


def planned(
    batches: Sequence[Batch],
    groups: int,
    width: int,
    parts: int,
    speeds: Sequence[float] = (),
    weights: Sequence[float] = (),
) -> BranchPlan:
    """Cut every branch into ``parts``, in proportion to ``weights`` if they are given. Give the
    longest piece to the group that would compute it first, then the next. ``speeds`` has the speed
    of each wider group of ``width`` groups; empty if all are alike.
    """
    pieces = [
        (number, start, end)
        for number, batch in enumerate(batches)
        for start, end in batch.pieces(parts, weights)
    ]
    loads = [0.0] * (groups // width)
    shares = []
    for number, start, end in sorted(
        pieces, key=lambda piece: -batches[piece[0]].weight * (piece[2] - piece[1])
    ):
        cost = batches[number].weight * (end - start)
        group = first_done(loads, cost, speeds)
        loads[group] += cost
        shares.append(Share(number, start, end, group))
    return BranchPlan(width, tuple(sorted(shares)))


def first_done(loads: Sequence[float], cost: float, speeds: Sequence[float] = ()) -> int:
    """Return the group that would be done with ``cost`` more first. If all groups are alike, it is
    the group with the least load.
    """
    ends = (
        [(load + cost) / speed for load, speed in zip(loads, speeds, strict=True)] if speeds else list(loads)
    )
    return ends.index(min(ends))


def cost_of(plan: BranchPlan, batches: Sequence[Batch], speeds: Sequence[float] = ()) -> float:
    """Return the time of the group that ends last. A group of mean speed takes a time equal to its
    cost.
    """
    loads: dict[int, float] = {}
    for number, start, end, group in plan.shares:
        loads[group] = loads.get(group, 0.0) + batches[number].weight * (end - start)
    own = joined([speed / fmean(speeds) for speed in speeds], plan.width)
    ends = [load / (own[group] if own else plan.width) for group, load in loads.items()]
    return max(ends) * (SEQUENCE_COST if plan.width > 1 else 1.0)
