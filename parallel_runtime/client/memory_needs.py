"""Knows the memory that an evaluation needs beside the weights on each rank's device: its count,
before the weights are loaded, and more after a count that was too low.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OutOfMemory, RunCancelled
from ..layout import Layout
from ..planner.counts import Counts, NotCounted
from ..planner.keeping import LEFT_FREE, are_cpus, as_gib
from ..planner.prediction import beside_bytes
from .residency import Residency
from .run import PooledModel, Run
from .runs import tell
from .session import Resident, Sessions

log = logging.getLogger("pipemesh")
MOST_RELOADS = 3  # of a model for one evaluation: each may take a minute


@dataclass(eq=False)
class Sampled:
    """Describes the present sampling: a latent of ``shape`` (B, C, ...) by ComfyUI's ``conds``.

    ``elements`` is the size, in each channel, of the largest latent that room was asked for; 0
    before the first evaluation. ``needed`` is the count of the present evaluation in bytes, 0 once
    it was computed.
    """

    model: weakref.ref[Any]
    shape: tuple[int, ...]
    conds: Mapping[str, Sequence[Mapping[str, Any]]]
    elements: int = 0
    needed: int = 0

    def note_latent(self, latent: Sequence[int]) -> tuple[bool, Sampled]:
        """Notes that room is asked for an evaluation of a ``latent`` of that shape, larger than
        those before. Returns whether it is the first evaluation, and a description with that shape.
        """
        is_first, self.elements = not self.elements, math.prod(latent[2:])
        shape = self.shape if is_first else (*self.shape[:2], *latent[2:])
        return is_first, replace(self, shape=shape, needed=0)


class MemoryNeeds:
    """Knows the memory that evaluations of one pool's models need beside the weights."""

    def __init__(self, sessions: Sessions, residency: Residency, counts: Counts):
        self._sessions = sessions
        self._residency = residency
        self._counts = counts

    def left_free(self, model: PooledModel, sampled: Sampled | None) -> int:
        """Returns the bytes to leave free on each device."""
        needed = 0
        if sampled is not None:
            try:
                needed = int(self._needed(model, sampled) * max(1.0, model.headroom.enough.part))
            except (NotCounted, RunCancelled) as error:  # who asks for room hears of Stop by itself
                log.info(
                    "[PipeMesh] PipeMesh does not know how much memory an evaluation takes (%s), and leaves"
                    " %d MiB free.",
                    error,
                    LEFT_FREE >> 20,
                )
        return max(LEFT_FREE, model.headroom.more, needed)

    def why_not_alone(self, model: PooledModel, sampled: Sampled, rows: int) -> str:
        """Says why the first rank cannot compute an evaluation of ``rows`` rows by itself, in fp32;
        empty if it can. Raises RunCancelled.
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
            return f"its memory is not known ({error})"
        free = session.pool.memory[0].free
        return (
            f"one worker would need {as_gib(needed)} for it, and {as_gib(free)} are free"
            if needed > free
            else ""
        )

    # -- before an evaluation is sent

    def short(self, model: PooledModel, sampled: Sampled, *, measures: bool) -> tuple[int, ...]:
        """Returns the ranks that have less memory free than the count of an evaluation. Returns
        none if there is no count yet, and none on CPUs, whose main memory can be freed although it
        looks taken. ``measures``: ranks measure anew, because ComfyUI may have loaded other models
        on its own GPU since their last answer. This also frees the memory that they keep of a run.
        """
        session = self._sessions.live
        if session is None or model not in session.models or are_cpus(session.pool.facts.names):
            return ()
        try:
            needed = self._needed(model, sampled, waits=False)
        except (NotCounted, RunCancelled):
            return ()
        if measures:
            tell(session, model, ())
        room, enough = session.room, model.headroom.enough.part * needed
        sampled.needed = needed
        short = tuple(rank for rank, there in enumerate(room) if there < enough)
        if short:
            log.info(
                "[PipeMesh] By count an evaluation needs %s on each device beside the weights, and %s are"
                " free on %s: PipeMesh frees other memory before it sends the evaluation.",
                as_gib(needed),
                as_gib(min(room)),
                ", ".join(session.pool.facts.names[rank] for rank in short),
            )
        return short

    def load_anew(self, model: PooledModel) -> bool:
        """Releases a model whose weights may leave more free, so that they are loaded anew with the
        counted headroom. Returns False if they could not leave more.
        """
        if self._reloadable(model) is None:
            return False
        self._residency.release(model)
        return True

    def had_room(self, model: PooledModel, sampled: Sampled | None = None) -> None:
        """Notes that an evaluation was computed, or that no further one is tried."""
        headroom = model.headroom
        headroom.reloads, headroom.has_restarted = 0, False
        if part := self._free_part(sampled):
            headroom.enough = headroom.enough.ran(part)

    def lacked_room(self, model: PooledModel, sampled: Sampled | None) -> None:
        """Notes that ranks ran out of memory in an evaluation."""
        model.headroom.enough = model.headroom.enough.lacked(self._free_part(sampled))

    def _free_part(self, sampled: Sampled | None) -> float:
        """Returns the free memory as a part of the counted need, if room was just asked for the
        evaluation: 0.5 if half of the need is free. Returns 0 for later evaluations, and if it was
        not counted.
        """
        if sampled is None or not sampled.needed or (session := self._sessions.latest) is None:
            return 0.0
        needed, sampled.needed = sampled.needed, 0
        return min(session.room) / needed

    # -- after ranks ran out of memory

    def may_start_again(self, run: Run) -> bool:
        """Returns whether a run may go on in a fresh pool after a lack of memory has ended the
        first pool: once a run, and not if the last fresh pool computed no evaluation of the model.
        """
        if run.restarts or run.model.headroom.has_restarted:
            return False
        run.restarts += 1
        run.model.headroom.has_restarted = True
        return True

    def held_others(self, model: PooledModel) -> bool:
        """Returns whether the pool that ended held other models: a fresh pool has their memory
        free.
        """
        session = self._sessions.latest
        return session is not None and bool(session.models.keys() - {model})

    def leave_more(self, model: PooledModel) -> bool:
        """Releases a model whose weights left too little free, so that they are loaded anew and
        leave more: half as much again in the second of ``MOST_RELOADS``, twice as much in the
        third. Returns False if they would leave no more. Raises OutOfMemory after the last.
        """
        held = self._reloadable(model)
        if held is None:
            return False
        headroom, reloads, leaves = model.headroom, model.headroom.reloads, held.weights.leaves
        if reloads == MOST_RELOADS:
            self.had_room(model)  # the next prompt may be another
            raise OutOfMemory(
                f"The weights were loaded anew {reloads} times, and an evaluation has still too little memory"
                f" with {as_gib(int(leaves))} left free on each device: make the image or the batch smaller,"
                " add devices, or free memory."
            )
        step = max(LEFT_FREE, leaves // 4)
        if leaves + step <= headroom.more:  # that was asked for, and brought no more
            return False
        headroom.more = int(leaves + step * 2**reloads)
        headroom.reloads += 1
        self._residency.release(model)
        return True

    def _reloadable(self, model: PooledModel) -> Resident | None:
        """Returns a model that ranks hold if it would leave more memory free when loaded anew; else
        None.
        """
        session = self._sessions.latest  # its pool may have ended for the lack of memory
        held = session.models.get(model) if session is not None else None
        if (
            held is None
            or math.isinf(held.weights.leaves)
            or (held.weights.kept == "offloaded" and not held.weights.budget)
        ):
            return None
        return held

    # -- by its count

    def _needed(self, pooled: PooledModel, sampled: Sampled, rows: int = 0, *, waits: bool = True) -> int:
        """Returns the bytes that each rank needs, or that one rank needs for ``rows`` rows by
        itself, in fp32. If the model is loaded, sampling goes on while the evaluation is counted.
        If it is not, the count is awaited, because the model would else be loaded twice. Without
        ``waits`` no count is awaited, because the image does not depend on it. Raises NotCounted,
        RunCancelled.
        """
        session = self._sessions.live
        is_up = session is not None and pooled in session.models
        model, conds = sampled.model(), [one for several in sampled.conds.values() for one in several]
        if model is None or not conds:
            raise NotCounted("nothing is sampled")
        whole = self._counts.of(model, conds, sampled.shape, is_up, waits)
        if rows:
            wider = max(1, 4 // model.get_dtype_inference().itemsize)
            layer = 4 * max((one.numel() for one in model.diffusion_model.parameters()), default=0)
            return wider * beside_bytes(whole, Layout(), 1, rows) + (layer if wider > 1 else 0)
        speeds = self._sessions.live.pool.facts.speeds if self._sessions.live is not None else ()
        return beside_bytes(whole, self._sessions.layout, len(conds), sampled.shape[0], speeds)
