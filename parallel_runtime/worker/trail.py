"""Count as progress the work of a GPU while this process only waits for it.

A rank enqueues a whole evaluation in milliseconds, and the GPU may compute it for minutes: judged
by its enqueueing alone, such a rank looks like one that hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..comm.device_copies import Reached

# Ticks between two places: a place is an event, which takes some microseconds of this process. The
# first ones are nearer to each other, because an evaluation of a small model has few ticks.
EVERY = 8


class Trail:
    """Places along one evaluation, in the order in which ``device``, a GPU, comes to them. ``tick``
    is called once for each place that it has come to.
    """

    def __init__(self, device: torch.device, tick: Callable[[], None]):
        self._device = device
        self._tick = tick
        self._ticks = 0
        self._places: deque[Reached] = deque()

    def note(self) -> None:
        """Note the place that the evaluation has come to, now and then."""
        self._ticks += 1
        if self._ticks % EVERY == 0 or self._ticks in (1, 2, 4):
            self._places.append(Reached(self._device))

    def look(self) -> None:
        """Count the places that the device has come to since the last look."""
        while self._places and self._places[0].is_over():
            self._places.popleft()
            self._tick()

    def is_over(self) -> bool:
        """Return whether the device has come to the last place that was noted, if there is any."""
        self.look()
        return self._ticks > 0 and not self._places

    def wait_for(self, end: Reached) -> None:
        """Wait until the device has come to the evaluation's end; count the places on the way.
        Raises RuntimeError if the device failed.
        """
        while self._places:
            self._places.popleft().wait()
            self._tick()
        end.wait()
