"""Make what takes long to import when it is asked for first, not when ComfyUI starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """Returns what ``make`` made, the same to every thread. What it raises, it raises at each
    call.
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
