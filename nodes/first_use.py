"""Make an object when it is first asked for, not when ComfyUI starts: importing its module takes
long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """Calls ``make`` once and returns the same object to every thread. If ``make`` raises, each
    call tries again and raises.
    """

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._lock = threading.Lock()
        self._made: Made | None = None

    def __call__(self) -> Made:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made
