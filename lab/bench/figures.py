"""The figures that benches report, and the statistics behind them: medians over interleaved rounds,
bootstrap intervals, goals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall
    from ...pool.fork_server import ServerProcess

Sample = TypeVar("Sample")
Chosen = TypeVar("Chosen")
Round = dict[str, float]  # phase -> seconds, all measured one right after another

LEVEL = 0.9
DRAWS = 2000


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def exactly(value: float) -> Estimate:
    """The estimate of a value that is counted, not sampled."""
    return Estimate(value, value, value)


def estimate(
    samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float], seed: int = 0
) -> Estimate:
    """Estimate ``statistic`` with its bootstrap interval. A sample is resampled whole, so the
    phases of one round stay together.
    """
    if len(samples) == 1:
        return exactly(statistic(samples))
    draw = random.Random(seed)
    drawn = sorted(statistic(draw.choices(samples, k=len(samples))) for _ in range(DRAWS))
    return Estimate(
        statistic(samples), percentile(drawn, (1 - LEVEL) / 2), percentile(drawn, (1 + LEVEL) / 2)
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def typical(rounds: Sequence[Round], phase: str) -> float:
    return median(round_[phase] for round_ in rounds)


def of_phase(phase: str) -> Callable[[Sequence[Round]], float]:
    return partial(typical, phase=phase)


def ratio(phase: str, other: str) -> Callable[[Sequence[Round]], float]:
    return lambda rounds: typical(rounds, phase) / typical(rounds, other)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal fails only where even the favourable end of the interval misses it."""

    at_least: float = -math.inf
    at_most: float = math.inf

    @classmethod
    def within(cls, share: float, of: float) -> Goal:
        return cls(at_least=of - share * abs(of), at_most=of + share * abs(of))

    def is_met(self, estimate: Estimate) -> bool:
        return estimate.high >= self.at_least and estimate.low <= self.at_most

    def __str__(self) -> str:
        ends = [f">= {number(self.at_least)}"] if self.at_least > -math.inf else []
        ends += [f"<= {number(self.at_most)}"] if self.at_most < math.inf else []
        return " and ".join(ends)


@dataclass(frozen=True)
class Figure:
    bench: str
    case: str
    metric: str
    estimate: Estimate
    unit: str
    goal: Goal | None = None

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.goal.is_met(self.estimate)

    def record(self) -> dict[str, Any]:
        """One line of ``--json``; ``goal`` is null or reads like ``>= 0.88``."""
        fields = {**asdict(self), **self.estimate._asdict(), "goal": str(self.goal) if self.goal else None}
        return {
            key: fields[key] for key in ("bench", "case", "metric", "value", "low", "high", "unit", "goal")
        }


@dataclass(frozen=True)
class CaseFigures:
    """The figures of one case of a bench: estimated of its ``samples``, or counted."""

    bench: str
    case: str
    samples: Sequence[Any] = ()

    def estimated(
        self, metric: str, statistic: Callable[[Sequence[Any]], float], unit: str, goal: Goal | None = None
    ) -> Figure:
        return Figure(self.bench, self.case, metric, estimate(self.samples, statistic), unit, goal)

    def counted(self, metric: str, value: float, unit: str, goal: Goal | None = None) -> Figure:
        return Figure(self.bench, self.case, metric, exactly(value), unit, goal)


def number(value: float) -> str:
    """Four digits, or all of a count: 0.9312, 12.35, 25174016."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Where:
    """Where a bench runs: with this ComfyUI, its processes forked from ``server``, or each a
    program of its own without one; and how large it is: as its figures need it, or the
    ``smallest`` that has them all.
    """

    server: ServerProcess | None
    smallest: bool

    @property
    def comfyui(self) -> str:
        """The folder of ComfyUI."""
        raise NotImplementedError

    def choose(self, usual: Chosen, least: Chosen) -> Chosen:
        return least if self.smallest else usual


@dataclass(frozen=True, kw_only=True)
class Options(Where):
    """The options of every bench. ``name``: which bench it is, of a module that is several."""

    host: ComfyInstall
    name: str = ""
    rounds: int = 25
    pictures: Path | None = None  # a folder for the pictures of benches that draw some
    prompts: int | None = None  # captions that benches of pictures sample; None is their own choice
    only: tuple[str, ...] = ()  # words that quality's cells have, or cases of against or trial
    against: Path | None = None  # another checkout
    smallest: bool = False
    server: ServerProcess | None = None

    @property
    def comfyui(self) -> str:
        return str(self.host.comfyui)
