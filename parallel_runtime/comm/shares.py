"""Share out tokens, heads and blocks in proportion to speed if devices differ. Pure arithmetic, the
same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..layout import Layout

ALIKE = 0.9  # devices nearer to each other than this share evenly: their speeds are not known better
PERCENT = 100


class Shares(NamedTuple):
    """Weights of the ranks of one sequence: of each for its tokens, in order, and of each rank of
    its ulysses group for its heads. Empty: as many each.
    """

    tokens: tuple[int, ...] = ()
    heads: tuple[float, ...] = ()


EVEN = Shares()


def relative(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the speeds of devices in percent of the fastest: (100, 50) if the second is half as
    fast. Empty if all are about alike, or one is not known.
    """
    fastest, slowest = max(speeds, default=0.0), min(speeds, default=0.0)
    if slowest <= 0 or slowest >= ALIKE * fastest:
        return ()
    return tuple(max(1, round(PERCENT * speed / fastest)) for speed in speeds)


def shares_of(layout: Layout, rank: int, speeds: Sequence[int]) -> Shares:
    """Return the shares of the sequence that ``rank`` is in. ``speeds`` of all ranks; empty if they
    are alike.

    Stages pass on the same tokens, and ranks of a ring the same heads: tokens are shared by what
    the ranks of all stages can do, heads by the rank that would take longest.
    """
    if not speeds:
        return EVEN
    stages, ulysses = stages_of(layout, rank, speeds), layout.ulysses
    tokens = tokens_of(stages)
    groups = [sum(tokens[first : first + ulysses]) for first in range(0, len(tokens), ulysses)]
    heads = tuple(
        min(
            stage[group * ulysses + place] / all_tokens
            for stage in stages
            for group, all_tokens in enumerate(groups)
        )
        for place in range(ulysses)
    )
    return Shares(() if len({*tokens}) == 1 else tokens, () if len({*heads}) == 1 else heads)


def stage_speeds(layout: Layout, speeds: Sequence[int]) -> tuple[float, ...]:
    """Return the speed of each stage: the least of its ranks', each divided by its share of tokens,
    as the mean of all groups, which cut a model alike. Empty if all stages are alike.
    """
    of_groups = []
    for sequence in layout.sequences() if speeds else ():
        if layout.stage(sequence[0]) == 0:
            stages = stages_of(layout, sequence[0], speeds)
            tokens = tokens_of(stages)
            of_groups.append(
                [min(own / share for own, share in zip(stage, tokens, strict=True)) for stage in stages]
            )
    found = tuple(map(fmean, zip(*of_groups, strict=True)))
    return () if len({*found}) <= 1 else found


def group_speeds(speeds: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return the summed speed of each group's ranks; empty if all groups are alike."""
    size = len(speeds) // groups
    found = tuple(sum(speeds[first : first + size]) for first in range(0, len(speeds), max(1, size)))
    return () if len({*found}) <= 1 else found


def stages_of(layout: Layout, rank: int, speeds: Sequence[int]) -> list[Sequence[int]]:
    """Return the speeds of the ranks of ``rank``'s group, one list for each stage."""
    return [[speeds[one] for one in layout.sequence(first)] for first in layout.of_stages(rank)]


def tokens_of(stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*stages, strict=True)))
