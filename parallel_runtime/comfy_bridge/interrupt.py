"""ComfyUI's cancel: asked for while the pool works, and raised where a request was cancelled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import comfy.model_management

from ..errors import RunCancelled


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
