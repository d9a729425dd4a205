"""Time each block of a stage in a run's first evaluations: stages are cut by what blocks cost."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

import torch

from ...patches import Part

TIMED = 5  # evaluations of each patch


class BlockTimes:
    """The times at which each block of one patch began and ended. On CUDA events keep them, so that
    noting one does not wait for the device.
    """

    def __init__(self) -> None:
        self._noted: defaultdict[int, list[float | torch.cuda.Event]] = defaultdict(list)

    def note(self, block: int, on_cuda: bool) -> None:
        self._noted[block].append(now_on_cuda() if on_cuda else time.perf_counter())

    def seconds(self) -> dict[int, float]:
        """Return what each block took. On CUDA, call it when the device has come so far."""
        return {block: between(*times) for block, times in self._noted.items() if len(times) == 2}


def now_on_cuda() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begun: Any, ended: Any) -> float:
    """Return the seconds between two times, or two events of a device."""
    return ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1e3


class BlockClock:
    """``times`` of the blocks in the patch at hand; empty where it is not timed."""

    def __init__(self, is_on: bool = True):
        self._limit = TIMED if is_on else 0
        self._begun: Counter[Part] = Counter()
        self._is_timed = False
        self.times = BlockTimes()

    def start(self, part: Part) -> None:
        self._begun[part] += 1
        self._is_timed = part.patch is not None and self._begun[part] <= self._limit
        self.times = BlockTimes()

    def note(self, block: int, on_cuda: bool) -> None:
        """Note the time before a block, then after it."""
        if self._is_timed:
            self.times.note(block, on_cuda)

    def end_run(self) -> None:
        self._begun.clear()
        self.times = BlockTimes()
