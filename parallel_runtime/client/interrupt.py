"""ComfyUI's cancel: asked for while the pool works, and raised if a request was cancelled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management

from ..errors import RunCancelled

POLL_S = 0.05


def interrupted() -> bool:
    """True if the user pressed cancel."""
    return comfy.model_management.processing_interrupted()


def interrupting(call: Callable) -> Callable:
    """Decorates a call so that RunCancelled becomes ComfyUI's own interrupt, a BaseException."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RunCancelled:
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise comfy.model_management.InterruptProcessingException() from None

    return wrapped


def wait_for(is_over: Callable[[float], bool]) -> None:
    """Calls ``is_over`` until it returns True. Each call may take the seconds that it is given.
    Raises ComfyUI's interrupt.
    """
    while not is_over(POLL_S):
        comfy.model_management.throw_exception_if_processing_interrupted()


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock. Raises ComfyUI's interrupt while another thread has it."""
    wait_for(lambda seconds: lock.acquire(timeout=seconds))
    try:
        yield
    finally:
        lock.release()
