"""What an evaluation needs beside the weights on each rank's device: by its count, before the
weights are loaded, and more where it was too little.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OutOfMemory, RunCancelled
from ..layout import Layout
from ..planner.counts import Counts, NotCounted
from ..planner.keeping import LEFT_FREE, as_gib
from ..planner.prediction import beside_bytes
from .residency import Residency
from .session import Sessions

log = logging.getLogger("pipemesh")
MOST_RELOADS = 3  # of a model for one evaluation: each may take a minute


@dataclass(frozen=True)
class Sampled:
    """What is about to be sampled: a latent of ``shape`` (B, C, ...) by ComfyUI's ``conds``."""

    model: weakref.ref[Any]
    shape: tuple[int, ...]
    conds: Mapping[str, Sequence[Mapping[str, Any]]]


class Beside:
    """Knows it for the models of one pool."""

    def __init__(self, sessions: Sessions, residency: Residency, counts: Counts):
        self._sessions = sessions
        self._residency = residency
        self._counts = counts
        self._more: dict[str, int] = {}  # of each model, for as long as ComfyUI runs
        self.reloads: Counter[str] = Counter()  # of each model since an evaluation had room

    def left_free(self, model: str, sampled: Sampled | None) -> int:
        """Returns the bytes to leave free on each device."""
        needed = 0
        if sampled is not None:
            try:
                needed = self._needed(model, sampled)
            except (NotCounted, RunCancelled) as error:  # who asks for room hears of Stop by itself
                log.info(
                    "[PipeMesh] What an evaluation takes is not known (%s): %d MiB are left free for it.",
                    error,
                    LEFT_FREE >> 20,
                )
        return max(LEFT_FREE, self._more.get(model, 0), needed)

    def why_not_alone(self, model: str, sampled: Sampled, rows: int) -> str:
        """Says why the first rank cannot compute an evaluation of so many rows by itself, in fp32;
        empty where it can. Raises RunCancelled.
        """
        session = self._sessions.live
        held = session.models.get(model) if session is not None else None
        if self._sessions.layout.stages > 1:
            return "each worker of a pipeline has a part of its blocks"
        if session is None or held is None:
            return "the workers do not hold it"
        if held.weights.kept == "sharded":
            return "each worker has a part of its weights"
        try:
            needed = self._needed(model, sampled, rows)
        except NotCounted as error:
            return f"what it takes is not known ({error})"
        free = session.pool.memory[0].free
        return (
            f"one worker would need {as_gib(needed)} for it, and {as_gib(free)} are free"
            if needed > free
            else ""
        )

    def leave_more(self, model: str) -> bool:
        """Releases a model whose weights left too little free, so that they are loaded anew and
        leave more: half as much again in the second of ``MOST_RELOADS``, twice as much in the
        third. Returns False if they would leave no more. Raises OutOfMemory after the last.
        """
        session = self._sessions.live
        held = session.models.get(model) if session is not None else None
        if (
            held is None
            or math.isinf(held.weights.leaves)
            or (held.weights.kept == "offloaded" and not held.weights.budget)
        ):
            return False
        reloads, leaves = self.reloads[model], held.weights.leaves
        if reloads == MOST_RELOADS:
            self.had_room(model)  # the next prompt may be another
            raise OutOfMemory(
                f"The weights were loaded anew {reloads} times, and an evaluation has still too little memory"
                f" with {as_gib(int(leaves))} left free on each device: make the image or the batch smaller,"
                " add devices, or free memory."
            )
        step = max(LEFT_FREE, leaves // 4)
        if leaves + step <= self._more.get(model, 0):  # that was asked for, and brought no more
            return False
        self._more[model] = int(leaves + step * 2**reloads)
        self.reloads[model] += 1
        self._residency.release(model)
        return True

    def had_room(self, model: str) -> None:
        """Notes that an evaluation was computed, or that no further one is tried."""
        self.reloads.pop(model, None)

    def _needed(self, name: str, sampled: Sampled, rows: int = 0) -> int:
        """Returns what each rank needs, or one rank for so many ``rows`` by itself, in fp32.
        Weights that are loaded can be sampled with while that is counted; those that are not would
        be loaded twice. Raises NotCounted, RunCancelled.
        """
        session = self._sessions.live
        is_up = session is not None and name in session.models
        model, conds = sampled.model(), [one for several in sampled.conds.values() for one in several]
        if model is None or not conds:
            raise NotCounted("nothing is sampled")
        whole = self._counts.of(model, conds, sampled.shape, is_up)
        if rows:
            wider = max(1, 4 // model.get_dtype_inference().itemsize)
            layer = 4 * max((one.numel() for one in model.diffusion_model.parameters()), default=0)
            return wider * beside_bytes(whole, Layout(), 1, rows) + (layer if wider > 1 else 0)
        speeds = self._sessions.live.pool.facts.speeds if self._sessions.live is not None else ()
        return beside_bytes(whole, self._sessions.layout, len(conds), sampled.shape[0], speeds)
