"""Cut a model's blocks into stages by the measured costs of the blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from statistics import median

from ..patches import Part
from ..stages import share_out, slowest

MAX_RECUT_RATIO = 0.95  # stages are cut anew where that makes the slowest one this much faster, or more

Sizes = tuple[int, ...]  # blocks of each stage; empty: as many each, or by their speeds


class StageBalance:
    """The stages of one model on one pool handle. Outlives the pools that it starts."""

    def __init__(self) -> None:
        self._seconds: dict[tuple, list[float]] = {}
        self._measured: Sizes | None = None  # the best sizes by the first run's costs
        self.wanted: Sizes = ()

    def learn(self, part: Part, block_s: Iterable[Mapping[int, float]], speeds: Sequence[float] = ()) -> None:
        """Notes the seconds that each rank's blocks took for one patch, until sizes were chosen by
        them. ``speeds`` of these ranks' stages; empty if all are alike.
        """
        if self._measured is None:
            for blocks, speed in zip(block_s, speeds or repeat(1.0), strict=False):
                for block, seconds in blocks.items():
                    self._seconds.setdefault((block, part.branch, part.patch), []).append(seconds * speed)

    def choose(self, asked: Sizes, stages: int, speeds: Sequence[float] = ()) -> Sizes:
        """Decides, between runs, how many blocks each stage has from now on: as ``asked``, else by
        the first run's cost: stages that followed every run would be loaded again and again.
        ``stages`` 0: not known yet. ``speeds`` of the stages; empty where they are alike.
        """
        if asked:
            self._seconds.clear()  # not needed any more
            self.wanted = asked
        else:
            costs = self.costs() if stages and self._measured is None else []
            if costs:
                self._measured = best_sizes(costs, stages, speeds)
            self.wanted = self._measured or ()
        return self.wanted

    def costs(self) -> list[float]:
        """Seconds of every block in order, for all patches of an evaluation. Medians, since a rank
        may lose its core now and then.
        """
        costs: defaultdict[int, float] = defaultdict(float)
        for (block, *_patch), seconds in self._seconds.items():
            costs[block] += median(seconds)
        return [cost for _, cost in sorted(costs.items())]


def best_sizes(costs: list[float], stages: int, speeds: Sequence[float] = ()) -> Sizes:
    """Returns the sizes that make the slowest stage fastest. Returns () if sharing blocks out by
    the stages' ``speeds`` alone is about as good.
    """
    even, best = (share_out(of, stages, speeds) for of in ([1.0] * len(costs), costs))
    worth_it = slowest(costs, best, speeds) < MAX_RECUT_RATIO * slowest(costs, even, speeds)
    return tuple(stage.size for stage in best) if worth_it else ()
