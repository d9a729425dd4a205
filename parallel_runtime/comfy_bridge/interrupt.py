"""ComfyUI's cancel, as the pool is asked about it and as the host is told of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import comfy.model_management

from ..errors import RunCancelled


def interrupted() -> bool:
    return comfy.model_management.processing_interrupted()


def interrupting(call: Callable) -> Callable:
    """A cancelled request becomes the host's own interrupt, which is a BaseException."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RunCancelled:
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise comfy.model_management.InterruptProcessingException() from None

    return wrapped
