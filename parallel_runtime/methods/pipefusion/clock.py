"""Time each block of a stage in a run's first evaluations: stages are cut by the costs of their
blocks.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...patches import Part

TIMED = 5  # evaluations of each patch


def block_seconds(times: Mapping[int, Sequence[Any]]) -> dict[int, float]:
    """Return the seconds of each block. On CUDA, call it after the device has passed the last
    block.
    """
    ended = {block: both for block, both in times.items() if len(both) == 2}
    return {
        block: end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        for block, (begin, end) in ended.items()
    }


class BlockClock:
    """Times the blocks of one run. ``times``: when each block of the present patch began and ended;
    empty if this patch is not timed. On CUDA they are events, so that noting a time does not wait
    for the device.
    """

    def __init__(self, is_on: bool = True):
        self._limit = TIMED if is_on else 0
        self._begun: Counter[Part] = Counter()
        self._is_timed = False
        self.times: defaultdict[int, list[float | torch.cuda.Event]] = defaultdict(list)

    def start(self, part: Part) -> Mapping[int, Sequence[Any]]:
        """Begin a patch; return its times, which come as its blocks run."""
        self._begun[part] += 1
        self._is_timed = part.patch is not None and self._begun[part] <= self._limit
        self.times = defaultdict(list)
        return self.times

    def note(self, block: int, device: torch.device) -> None:
        """Note the time before a block, then after it."""
        if not self._is_timed:
            return
        now: float | torch.cuda.Event = time.perf_counter()
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.times[block].append(now)
