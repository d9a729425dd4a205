"""Judge whether ranks hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Watch:
    """Judges hangs by progress counters: a slow rank that still counts is healthy, and one that
    waits for another counts as long as that one does.
    """

    def __init__(self, progress: Callable[[int], int], clock: Callable[[], float] = time.monotonic):
        """``progress`` reads a rank's counter."""
        self._progress = progress
        self._clock = clock
        self._seen: dict[int, int] = {}
        self._changed = clock()

    def stalled_rank(self, ranks: Sequence[int], stall_s: float) -> int | None:
        """Returns the rank that is furthest behind if none of ``ranks`` has moved for ``stall_s``
        seconds, else None. A look at other ranks than last time begins anew.
        """
        seen = {rank: self._progress(rank) for rank in ranks}
        if seen != self._seen:
            self._seen, self._changed = seen, self._clock()
        if seen and self._clock() - self._changed > stall_s:
            return min(seen, key=lambda rank: seen[rank])
        return None
