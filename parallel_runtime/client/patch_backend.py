"""Compute one model's patches in a pool of stages."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import lru_cache
from typing import Any

from ..branches import Batch
from ..crossing.rows import Constants, joined_outputs, take
from ..errors import OutOfMemory
from ..patches import Patch
from .branch import SampleCall
from .evaluations import Work, one_thread
from .interrupt import interrupted, interrupting
from .remote_pool import RemotePool
from .room import tell_of_fresh_workers
from .run import PooledModel
from .session import Ticket

NO_LOAD = -1


class PipelineBackend:
    """Computes the patches of a model that a pipeline holds: a ``PatchBackend``."""

    def __init__(self, pool: RemotePool, model: PooledModel, constants: Constants, beside_ui: bool):
        self._pool = pool
        self._model = model
        self.constants = constants
        self.beside_ui = beside_ui
        self._pieces = lru_cache(maxsize=32)(Batch.pieces)  # alike in all evaluations of a run, as a rule
        # Arguments, and some rows of them
        self._taken: tuple[Any, dict[tuple[int, int], dict[str, Any]]] = None, {}
        self._load: int | None = None  # of the model's loads, the one that this run's K/V buffers belong to

    def begin_run(self) -> None:
        self._pool.runs.restart(self._pool.runs.of(self._model))
        self._load = None

    def restart_if_reloaded(self) -> bool:
        load, self._load = self._load, self._model.loads
        if load in (None, self._load):
            return False
        self._pool.runs.restart(self._pool.runs.of(self._model))
        return True

    def submit(self, call: SampleCall, patch: Patch | None) -> list[Ticket]:
        """Submits a patch to every group that computes some of its rows. A group computes the same
        rows in all of the run, because it keeps their keys and values.
        """
        run, layout, session = self._pool.runs.of(self._model), self._pool.layout, self._pool.sessions.live
        batch, branch = self.constants.batch_of(call.arguments), call.branch
        speeds, tickets = session.group_speeds if session is not None else (), []
        with one_thread():
            pieces = self._pieces(
                batch,
                layout.parts_of_batches,
                tuple(sorted(speeds, reverse=True)) if len(speeds) == layout.parts_of_batches else (),
            )
            for start, end in pieces:
                rows, own = call.arguments, branch
                if len(pieces) > 1:
                    rows = self._rows(rows, start, end, batch)
                    own = replace(branch, rows=(start, end))
                group = run.names.group_of(own, batch.weight * (end - start), layout.groups, speeds)
                work = Work(rows, own, layout.members(group))
                tickets.append(self._pool.evaluations.submit(run, work, astuple(patch) if patch else None))
        return tickets

    def _rows(self, arguments: dict[str, Any], start: int, end: int, batch: Batch) -> dict[str, Any]:
        """Returns the arguments of some rows. All patches of an evaluation get the same object, by
        which their written arguments are found again.
        """
        if self._taken[0] is not arguments:
            self._taken = arguments, {}
        if (start, end) not in self._taken[1]:
            self._taken[1][start, end] = take(arguments, start, end, batch, self.constants.names)
        return self._taken[1][start, end]

    @interrupting
    def collect(self, ticket: list[Ticket]) -> Any:
        return joined_outputs([self._pool.evaluations.collect(one, interrupted) for one in ticket])

    def make_room(self) -> bool:
        return self._pool.residency.make_room(self._model)

    def may_start_again(self) -> bool:
        return self._pool.memory_needs.may_start_again(self._pool.runs.of(self._model))

    def tell_of_fresh_workers(self, error: OutOfMemory) -> None:
        tell_of_fresh_workers(self._pool, error)

    def abandon(self) -> None:
        """Ends all patches in flight. The keys and values that stages kept of a failed evaluation
        are void: the next one is whole.
        """
        self._pool.evaluations.abandon()
        if self._load is not None:
            self._load = NO_LOAD
