"""Take the context windows of one evaluation to the groups of ranks together.

ComfyUI's loop asks for a window when it has the one before (comfy/context_windows.py @ 0.30.0),
although no window depends on another (``lookahead``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from comfy.context_windows import IndexListContextHandler

from .lookahead import Lookahead

HOSTS = IndexListContextHandler.__module__  # other schedules may need what a run has
OTHERWISE = (
    "ComfyUI goes through the context windows of this evaluation in another way than at first: update"
    " PipeMesh, and bypass PipeMesh Parallelize until then."
)
ComputeTogether = Callable[[Sequence[Callable[[], Any]], Any], list[Any]]


class WindowsTogether(IndexListContextHandler):
    """Stands for the handler of a run. ``in_sequence`` says of a MODEL, conds and options when one
    window has to wait for another, ``together`` runs windows of a MODEL side by side, ``at_once``
    of them: what ComfyUI prepares for each, such as ControlNets' residuals, takes memory.
    """

    def __init__(
        self,
        handler: IndexListContextHandler,
        in_sequence: Callable[..., bool],
        together: ComputeTogether,
        at_once: int,
    ):
        self.__dict__.update(vars(handler))
        self._in_sequence = in_sequence
        self._together = together
        self._at_once = at_once
        self._ahead: Lookahead[Callable[[], Any], Any] | None = None
        self._is_asking = False

    def execute(self, calc_cond_batch: Any, model: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
        stock = partial(super().execute, calc_cond_batch, model, conds, *args, **kwargs)
        options = signature(super().execute).bind(*stock.args, **kwargs).arguments["model_options"]
        if self._in_sequence(model.current_patcher, conds, options):
            return stock()
        self._ahead = Lookahead(
            lambda now: self._together(now, model.current_patcher), self._at_once, OTHERWISE
        )
        self._is_asking = True
        try:
            stock()
            self._is_asking = False
            return stock()
        finally:
            self._ahead = None

    def evaluate_context_windows(self, *args: Any, **kwargs: Any) -> Any:
        if self._ahead is not None and not self._is_asking:
            return self._ahead.answer()
        stock = partial(super().evaluate_context_windows, *args, **kwargs)
        if self._ahead is None:
            return stock()
        given = signature(stock.func).bind(*args, **kwargs).arguments
        options = given["model_options"]  # each window writes into its own
        own = {**options, "transformer_options": dict(options["transformer_options"])}
        self._ahead.ask(partial(stock.func, **{**given, "model_options": own}))
        return []


def can_be_together(handler: Any) -> bool:
    """Return whether nothing but ComfyUI's own loop goes through the windows."""
    if type(handler) is not IndexListContextHandler or handler.callbacks:
        return False
    return "model_options" in signature(handler.evaluate_context_windows).parameters


def windows_of(model_options: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return how many windows an evaluation of a latent of ``shape`` has at first, and the shape of
    one window; 1 and the latent's own shape if it has no windows, or is packed with other latents.
    """
    handler: Any = model_options.get("context_handler")
    own = tuple(shape)
    if type(handler) is not IndexListContextHandler or not 3 < len(own) > handler.dim:
        return 1, own
    if own[handler.dim] <= handler.context_length or handler.context_schedule.func.__module__ != HOSTS:
        return 1, own
    windows = handler.context_schedule.func(own[handler.dim], handler, model_options)
    frames = max(map(len, windows)) + handler.causal_window_fix  # a frame before each but the first
    return len(windows), (*own[: handler.dim], frames, *own[handler.dim + 1 :])
