"""Judge whether runs of a pool were slower than one GPU: more than once, and by more than measuring
error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from ..parallel_runtime.layout import Layout
from .bounded_dict import Latest

JUDGED = 3  # steps, beside the first, from which on a run is judged
RUNS = 2
# Shares of the time: from run to run; of what one GPU would take by what ranks computed
LEAST, PREDICTED = 0.05, 0.1


@dataclass(frozen=True)
class StepTime:
    """The median time of a step in seconds, and an interval that holds the true median nineteen
    times out of twenty, by the spread of the steps: 1.00 s, from 0.95 s to 1.05 s.
    """

    step_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, between: Sequence[float]) -> StepTime | None:
        """Returns None for no steps. Fewer than ``JUDGED`` steps show no spread, so their interval
        is infinite.
        """
        if not between:
            return None
        middle = median(between)
        if len(between) < JUDGED:
            return cls(middle, 0.0, math.inf)
        first, _, third = quantiles(between, n=4, method="inclusive")
        # The notches of a box plot
        apart = max(1.57 * (third - first) / math.sqrt(len(between)), LEAST * middle)
        return cls(middle, middle - apart, middle + apart)

    def of_one(self, images: int) -> StepTime:
        """Returns the time of one image if so many ``images`` were sampled together."""
        return StepTime(self.step_s / images, self.low_s / images, self.high_s / images)

    def times(self, factor: float) -> StepTime:
        """Returns the time that is predicted if each step takes ``factor`` times as long, within a
        wider interval.
        """
        return StepTime(
            factor * self.step_s,
            factor * self.low_s * (1 - PREDICTED),
            factor * self.high_s * (1 + PREDICTED),
        )


class Slower:
    """Remembers the last runs of each key and layout for as long as ComfyUI runs: the step time of
    each run, and the time that was predicted for one GPU.
    """

    def __init__(self) -> None:
        self._runs: Latest[tuple[Any, Layout], deque[tuple[StepTime, StepTime | None]]] = Latest()

    def note(self, kind: Any, layout: Layout, own: StepTime, predicted: StepTime | None) -> None:
        before = self._runs.get((kind, layout), ())
        self._runs[kind, layout] = deque([*before, (own, predicted)], maxlen=RUNS)

    def why(self, kind: Any, layout: Layout, one_gpu: StepTime | None) -> str:
        """Says that the last runs were slower than one GPU; empty if they were not, or if that is
        not certain. ``one_gpu`` is the measured time of one GPU; None if it was never measured.
        """
        compared = [(own, one_gpu or predicted) for own, predicted in self._runs.get((kind, layout), ())]
        slower = [(own, alone) for own, alone in compared if alone is not None and own.low_s > alone.high_s]
        if len(slower) < RUNS:
            return ""
        ours, theirs = (median(one.step_s for one in times) for times in zip(*slower, strict=True))
        known = "takes" if one_gpu is not None else "is predicted to take"
        return (
            f"The last {RUNS} runs of this kind took {ours:.2f} s a step in {layout.equation()}, but one GPU"
            f" {known} {theirs:.2f} s."
        )
