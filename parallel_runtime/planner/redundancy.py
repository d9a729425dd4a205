"""How much the output of each block changes from one evaluation of a run to the next (after arXiv
2411.13588), and how long a warm-up that asks for.

A patch attends to its neighbours' keys and values of the evaluation before. So a pipeline loses
little where blocks change little, and its warm-up should last until they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

SETTLED = 1.5  # times the median change of the run


@dataclass(frozen=True)
class Redundancy:
    """Change of each block, by its name: over each evaluation but the first, the distance to its
    output in the evaluation before, relative to that output.
    """

    changes: Mapping[str, Sequence[float]]

    @property
    def evaluations(self) -> int:
        return len(next(iter(self.changes.values()))) + 1

    @property
    def by_evaluation(self) -> list[float]:
        """The mean over all blocks, from the second evaluation on."""
        return [fmean(values) for values in zip(*self.changes.values(), strict=True)]


def warm_up_for(redundancy: Redundancy) -> int:
    """Return the fewest first evaluations, one at least, after which blocks change no more than
    ``SETTLED`` times what is usual in the run.
    """
    means = redundancy.by_evaluation
    usual = median(means)
    return next(number for number, change in enumerate(means, 1) if change <= SETTLED * usual)
