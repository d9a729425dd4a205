"""Show users why they wait, from the start of a sampling until its first step: as text and bar on
the sampler's node, and as an event for the panel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..parallel_runtime.client.wait import Wait
from ..pool.progress import Told
from .notices import executed_now
from .progress_event import Waited

if TYPE_CHECKING:
    from .screen import NodeScreen

FIRST_BEAT_S, BEAT_S = 0.5, 1.0
SHOWN_EVERY_S = 0.25
BEGINS, FIRST_STEP = Told("PipeMesh: sampling begins"), Told("PipeMesh: the first step")
CAME, OVER = (
    "PipeMesh: the first step came after {:.0f} s",
    "PipeMesh: the wait for a first step is over, after {:.0f} s",
)


class Waiting(Wait):
    """Shows the wait of one sampling at a time, again and again, so that a user sees it go on even
    if ComfyUI's own process works or a first step takes minutes.

    Tests hand in ``clock`` and ``pause``; ``pause`` makes the event that a thread waits on.
    """

    def __init__(
        self,
        screen: NodeScreen,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[], Any] = threading.Event,
    ):
        self._screen = screen
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._over: Any = None  # an event while a sampling is waited for
        self._where = ("", "")
        self._began = 0.0
        self._shown: float | None = None  # when something was shown last
        self._told = BEGINS
        self._stays = ""  # what is left on the node

    def begin(self) -> None:
        """Begins a wait if a node samples, unless its wait has begun."""
        where = executed_now()
        with self._lock:
            if not where[0] or (self._over is not None and where == self._where):
                return
            self._end()
            self._screen.note_bar(where[0])
            self._over, self._where, self._told, self._stays = self._pause(), where, BEGINS, ""
            self._began, self._shown = self._clock(), None
            threading.Thread(
                target=self._beat, args=(self._over,), name="pipemesh-waiting", daemon=True
            ).start()

    def tell(self, told: Told) -> bool:
        """Shows the present cause of the wait. Returns False if no sampling is waited for."""
        with self._lock:
            if self._over is None:
                return False
            is_other = told.text != self._told.text
            self._told = told if told.text else BEGINS
            if told.stays:
                self._stays = told.line
            if is_other or self._shown is None or self._clock() - self._shown >= SHOWN_EVERY_S:
                self._show(self._over)
            if told.text and not told.total:  # it is done, and the first step is waited for
                self._told = FIRST_STEP
            return self._over is not None

    def is_seen(self) -> bool:
        return self._screen.is_seen()

    def end(self) -> None:
        """Ends the wait: the sampling is over, or begins anew without the pool."""
        with self._lock:
            self._end()

    def came(self) -> None:
        """Ends the wait: the first step is done. If the node has a bar of its own, the bar shows
        that too.
        """
        with self._lock:
            self._end(came=True)

    def _end(self, *, came: bool = False) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None
            if self._shown is not None:
                line = CAME if came or self._screen.is_sampling(self._where[0]) else OVER
                self._screen.end(self._where[0], self._stays or line.format(self._clock() - self._began))

    def _beat(self, over: Any) -> None:
        pause = FIRST_BEAT_S
        while not over.wait(pause):
            with self._lock:
                if not self._show(over):
                    return
            pause = BEAT_S

    def _show(self, over: Any) -> bool:
        """Returns whether the wait goes on."""
        if over is not self._over:
            return False
        node, prompt = self._where
        if self._screen.is_sampling(node):
            self._end()
            return False
        self._shown = self._clock()
        seconds, told = self._shown - self._began, self._told
        self._screen.show(
            Waited(node, prompt, f"{told.line.rstrip('.')}, {seconds:.0f} s", told.done, told.total, seconds)
        )
        return True
