"""Judge whether ranks hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Watch:
    """Judges hangs by progress counters: a slow rank that still counts is healthy; one that waits
    for another is not counted alone.
    """

    def __init__(self, progress: Callable[[int], int], stall_s: float, clock: Callable[[], float] = time.monotonic):
        self._progress = progress
        self.stall_s = stall_s
        self._clock = clock
        self._seen: dict[int, int] = {}
        self._changed = clock()

    def stalled(self, ranks: Sequence[int], stall_s: float | None = None) -> int | None:
        """The rank that is furthest behind if none of ``ranks`` has moved for ``stall_s`` seconds
        (the watch's own where none are given), else None.
        """
        seen = {rank: self._progress(rank) for rank in ranks}
        if seen != self._seen:
            self._seen, self._changed = seen, self._clock()
        if seen and self._clock() - self._changed > (self.stall_s if stall_s is None else stall_s):
            return min(seen, key=lambda rank: seen[rank])
        return None
