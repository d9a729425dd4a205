"""Time each block of a stage in a run's first evaluations: stages are cut by what blocks cost."""

from __future__ import annotations

import time
from collections import Counter

import torch

from ...patches import Part

TIMED = 5  # evaluations of each patch


class BlockClock:
    """``seconds`` of each block in the patch at hand; empty where it is not timed."""

    def __init__(self, is_on: bool = True):
        self._limit = TIMED if is_on else 0
        self._begun: Counter[Part] = Counter()
        self._is_timed = False
        self.seconds: dict[int, float] = {}

    def start(self, part: Part) -> None:
        self._begun[part] += 1
        self._is_timed = part.patch is not None and self._begun[part] <= self._limit
        self.seconds = {}

    def note(self, block: int, on_cuda: bool) -> None:
        """Note the time before a block, then after it. On CUDA this waits for what was computed,
        not for messages.
        """
        if self._is_timed:
            if on_cuda:
                torch.cuda.current_stream().synchronize()
            now = time.perf_counter()
            self.seconds[block] = now - self.seconds[block] if block in self.seconds else now

    def end_run(self) -> None:
        self._begun.clear()
        self.seconds = {}
