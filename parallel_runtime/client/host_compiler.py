"""Keep ComfyUI's model compiler away from evaluations that are computed elsewhere.

Newer ComfyUIs record what a model's forward allocates in the thread that samples, and replay it.
The forward that stands here allocates otherwise in every step, and several may be in flight.

Read: comfy/model_prefetch.py of ComfyUI 0.38.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import comfy.cli_args
import comfy.model_prefetch

OPTION = "disable_comfy_compiler"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, ComfyUI begins no recording: by its own option, which is put back."""
    args = comfy.cli_args.args
    if not hasattr(args, OPTION):
        yield
        return
    before = getattr(args, OPTION)
    setattr(args, OPTION, True)
    try:
        yield
    finally:
        setattr(args, OPTION, before)


def paused() -> AbstractContextManager[object]:
    """Inside, a recording that this thread is in leaves allocations out."""
    pause = getattr(comfy.model_prefetch, "pause_malloc_graph", None)
    return nullcontext() if pause is None else pause()
