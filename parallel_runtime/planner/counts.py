"""Knows the cost of one evaluation of a loaded MODEL: each kind of evaluation is counted once, in
another process.

The UI's process counts nothing itself: a shape-only run replaces functions of torch and ComfyUI,
which other threads of the UI would call meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch

from ..errors import RunCancelled
from ..families import plan_or_whole
from ..wire.tree import NotPlain
from .evaluation_count import Whole
from .keeping import model_bytes
from .meta_model import model_description

TEXT = 64  # tokens by which texts are counted
MOST = 50  # kinds of evaluations whose counts are kept
# How long a sampling waits for its count, with the start of the process, where nothing is up to
# sample it
PATIENCE_S = 60.0
WHILE_UP_S = 5.0  # and where something is
POLL_S = 0.05
LOST_S = 600.0  # after which a count whose process was lost is begun again: memory may be free by then


class NotCounted(Exception):
    """A MODEL cannot be run dry, for the reason given."""


class NotYet(NotCounted):
    """A MODEL is being counted, and a sampling has waited long enough."""


class CounterLost(NotCounted):
    """The process that counts was lost, or took too long: another time it may not be."""


# Begins a count by a description of ``meta_model``; the future may raise NotCounted
Begin = Callable[[bytes], "Future[Whole]"]


@dataclass
class PendingCount:
    """A count that was begun at a time."""

    future: Future[Whole]
    at_s: float


class Counts:
    """Counts of evaluations, for all pools. A sampling waits ``patience_s`` for its own at most;
    the count goes on, and the next sampling of its kind has it.
    """

    def __init__(
        self,
        begin: Begin,
        interrupted: Callable[[], bool] = lambda: False,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._begin = begin
        self._interrupted = interrupted
        self._patience_s = patience_s
        self._clock = clock
        self._begun: dict[bytes, PendingCount] = {}

    def of(
        self,
        model: Any,
        conds: Sequence[Mapping[str, Any]],
        shape: tuple[int, ...],
        is_up: bool = False,
        waits: bool = True,
    ) -> Whole:
        """Return the count of one evaluation of ``model``, a BaseModel: for the longest of
        ComfyUI's ``conds``, and one latent of a batch of ``shape`` (B, C, ...). ``is_up``: a pool
        is that could sample it without the count. Unless the caller ``waits``, a count that is not
        there is begun for the next time. Weights are those of ``model``: quantised ones are smaller
        than the meta model's. Raises NotCounted, RunCancelled.
        """
        plan = plan_or_whole(type(model.diffusion_model))
        if plan is None:
            raise NotCounted(f"{type(model.diffusion_model).__name__} has no token plan")
        if any(group.branch for group in plan.blocks):
            raise NotCounted(f"the blocks of {type(model.diffusion_model).__name__} are called twice")
        try:
            asked = model_description(model, with_rounded_text(longest(conds)), (1, *shape[1:]))
        except NotPlain as error:
            raise NotCounted(f"its copy without weights cannot be described: {error}") from None
        patience_s = min(WHILE_UP_S, self._patience_s) if is_up else self._patience_s
        patience_s = patience_s if waits else 0.0
        return replace(self._awaited(asked, patience_s), **vars(model_bytes(model.diffusion_model, plan)))

    def _awaited(self, asked: bytes, patience_s: float) -> Whole:
        key = blake2b(asked, digest_size=16).digest()
        begun = self._begun.get(key)
        if begun is None or (is_lost(begun.future) and self._clock() - begun.at_s >= LOST_S):
            begun = self._begun[key] = PendingCount(self._begin(asked), self._clock())
            if len(self._begun) > MOST:
                del self._begun[next(iter(self._begun))]
        until = begun.at_s + patience_s
        while not begun.future.done():
            if self._interrupted():
                raise RunCancelled("The run was cancelled.")
            if (left_s := until - self._clock()) <= 0:
                raise NotYet(f"the cost of an evaluation was not counted within {patience_s:g} s")
            wait([begun.future], min(POLL_S, left_s))
        if (error := begun.future.exception()) is not None:
            raise NotCounted(str(error))  # the error itself would gather what each sampling holds
        return begun.future.result()


def is_lost(future: Future[Whole]) -> bool:
    return future.done() and isinstance(future.exception(), CounterLost)


def count_nothing(asked: bytes) -> Future[Whole]:
    """Count nothing: of pools that nobody has given a process that counts."""
    future: Future[Whole] = Future()
    future.set_exception(NotCounted("nothing counts here"))
    return future


def longest(conds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the cond with the longest text, because its evaluation takes longest."""
    return max(
        conds, key=lambda cond: cond["cross_attn"].shape[1] if cond.get("cross_attn") is not None else 0
    )


def with_rounded_text(cond: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a cond with a few tokens more of text, so that most prompts are counted as one."""
    text = cond.get("cross_attn")
    if not isinstance(text, torch.Tensor) or text.dim() != 3 or "attention_mask" in cond:
        return cond
    tokens = -(-text.shape[1] // TEXT) * TEXT
    return {
        **cond,
        "cross_attn": torch.empty(text.shape[0], tokens, text.shape[2], dtype=text.dtype, device="meta"),
    }
