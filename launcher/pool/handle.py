"""Handles on pools: a pool is started when it is first needed, and afresh after it failed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from ...parallel_runtime.layout import Layout
from .conversation import POLL_S, stop_if
from .devices import Placement
from .pool import WorkerPool, never
from .rank_setup import RankSetup

log = logging.getLogger("pipemesh")


class PoolHandle:
    """Starts the pool of a placement when it is needed. Nodes pass it around in place of a pool."""

    def __init__(
        self,
        placement: Placement,
        setup: RankSetup,
        before_start: Callable[[PoolHandle], None] = lambda handle: None,
        after_start: Callable[[WorkerPool], None] = lambda pool: None,
    ):
        self.placement = placement
        self._setup = setup
        self._before_start = before_start
        self._after_start = after_start
        self._pool: WorkerPool | None = None
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def state(self) -> str:
        """Return closed, starting, ready, busy, or failed, also of a pool that is up without a
        rank.
        """
        return "failed" if self.fault else self._pool.state if self._pool else "closed"

    @property
    def holds_devices(self) -> bool:
        """Return whether ranks are up, also where one was lost."""
        return self._pool is not None and self._pool.is_alive

    @property
    def fault(self) -> str:
        """Returns why the last pool cannot take requests, where ranks were lost."""
        pool = self._pool
        return "" if pool is None else pool.ranks.fault or (pool.ranks.loss() if pool.is_alive else "")

    def live(self) -> WorkerPool | None:
        """Returns the pool if it can take requests now, None where it has lost a rank meanwhile."""
        pool = self._pool
        return pool if pool is not None and pool.is_alive and not pool.ranks.has_lost_one(pool.idle) else None

    def ensure(self, interrupted: Callable[[], bool] = never) -> WorkerPool:
        """Returns the live pool, else a fresh one. Raises PoolFailed, RunCancelled."""
        while not self._lock.acquire(timeout=POLL_S):  # another thread starts it
            stop_if(interrupted)
        try:
            pool = self.live()
            if pool is None:
                if self._pool is not None:
                    self._pool.close()  # of one that lost a rank between runs, the others are still there
                self._before_start(self)
                pool = self._pool = WorkerPool(self.placement, self._setup)
                pool.start(interrupted)
                self._after_start(pool)
            return pool
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


class PoolKeeper:
    """Keeps every pool of this ComfyUI. One at a time may hold a device: starting another layout on
    it closes the first, and calls ``ended`` with the placements of both, the first one's before.
    ``started`` is called with each pool that is up.
    """

    def __init__(
        self,
        setup: RankSetup,
        ended: Callable[[Placement, Placement], None] = lambda old, new: None,
        started: Callable[[WorkerPool], None] = lambda pool: None,
    ):
        self._setup = setup
        self._ended = ended
        self._started = started
        self._handles: dict[Placement, PoolHandle] = {}
        weakref.finalize(self, close_all, self._handles)

    def handle(self, placement: Placement) -> PoolHandle:
        if placement not in self._handles:
            self._handles[placement] = PoolHandle(placement, self._setup, self._make_room, self._started)
        return self._handles[placement]

    def handles(self) -> list[PoolHandle]:
        return list(self._handles.values())

    def _make_room(self, newcomer: PoolHandle) -> None:
        for handle in self._handles.values():
            shared = set(handle.placement.devices) & set(newcomer.placement.devices)
            if handle is not newcomer and shared and handle.holds_devices:
                handle.close()
                self._ended(handle.placement, newcomer.placement)

    def close(self) -> None:
        close_all(self._handles)


def close_all(handles: dict[Placement, PoolHandle]) -> None:
    for handle in handles.values():
        handle.close()
