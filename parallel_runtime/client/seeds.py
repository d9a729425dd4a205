"""Run a stock sampler for several seeds at once, each on groups of ranks of its own.

Each seed is a coroutine with random numbers of its own. It is suspended at every evaluation until
the evaluations of all seeds are computed. So the first seed's sampler, which a prompt waits for,
waits for one evaluation of the others and for nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import PipeMeshError, PoolFailed
from .branch import Compute, SampleCall
from .coroutines import Coroutine, RandomState, unwind

log = logging.getLogger("pipemesh")


@dataclass(frozen=True, eq=False)
class SeedSampler:
    """One seed's sampler, and the random state that it starts from."""

    sample: Callable[[], torch.Tensor]
    random: RandomState


@dataclass(frozen=True, eq=False)
class SeedResult:
    """The samples of one seed, and the random state that its sampler left."""

    samples: torch.Tensor
    random: RandomState


class Seed(Coroutine):
    """``number`` 0 is the seed that a prompt waits for."""

    def __init__(self, number: int, start: SeedSampler, device: torch.device):
        super().__init__(start.sample, start.random, device)
        self.number = number

    def own_calls(self) -> list[SampleCall]:
        """Returns the calls that it waits for, under branches that no other seed has."""
        if not self.number:
            return [*self.asked]
        return [replace(call, branch=replace(call.branch, call=self.number)) for call in self.asked]


@torch.no_grad()  # samplers switch gradients off and on for the whole thread: off until the last is done
def sample_together(
    starts: Sequence[SeedSampler], together: Compute, alone: Compute, device: torch.device
) -> list[SeedResult | None]:
    """Samples all seeds. ``together`` computes the evaluations of several seeds, ``alone`` those of
    the first. When the first seed has ended, a seed that has not ended is dropped: its result is
    None, like that of a seed that failed. Raises the first seed's errors; if ``together`` fails,
    the first seed goes on alone.
    """
    seeds = [Seed(number, start, device) for number, start in enumerate(starts)]
    first, going = seeds[0], list(seeds)
    try:
        going = [seed for seed in seeds if _goes_on(seed)]
        while first in going:
            try:
                calls = [call for seed in going for call in seed.own_calls()]
                outputs = iter((together if len(going) > 1 else alone)(calls))
            except PoolFailed:
                raise
            except (PipeMeshError, torch.OutOfMemoryError) as error:
                if len(going) == 1:
                    raise
                log.warning("[PipeMesh] One image goes on alone, and the others are sampled later: %s", error)
                unwind(going[1:])
                going, outputs = [first], iter(alone(first.asked))
            given = {seed: [next(outputs) for _ in seed.asked] for seed in going}
            going = [seed for seed in going if _goes_on(seed, given[seed])]
    finally:
        unwind(seeds)
    first.random.restore()
    return [None if seed.result is None else SeedResult(seed.result, seed.random) for seed in seeds]


def _goes_on(seed: Seed, *outputs: list[Any]) -> bool:
    """Runs a seed further. An error ends only that seed, unless it is the first."""
    try:
        seed.resume(*outputs)
    except Exception as error:
        if not seed.number:
            raise
        log.warning(
            "[PipeMesh] An image that was sampled ahead failed, and is sampled later:", exc_info=error
        )
    return not seed.dead
