"""Handles on pools: a pool is started when it is first needed, and afresh after it failed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..parallel_runtime.errors import RunCancelled
from ..parallel_runtime.layout import Layout
from .conversation import POLL_S, stop_if
from .devices import Placement
from .pool import WorkerPool, never
from .rank_setup import RankSetup

log = logging.getLogger("pipemesh")


class Starts:
    """Lets one pool start or end at a time, so that no other pool takes the memory that a starting
    pool has freed for itself. No pool starts once ``are_over``, when ComfyUI ends.
    """

    def __init__(self) -> None:
        self.are_over = False
        self._lock = threading.RLock()

    @contextmanager
    def turn(self, interrupted: Callable[[], bool] = never) -> Iterator[None]:
        """Waits for the turn to start a pool. Raises RunCancelled if the user cancels while another
        thread has its turn, or if ComfyUI ends.
        """
        while not self._lock.acquire(timeout=POLL_S):
            stop_if(interrupted)
        try:
            if self.are_over:
                raise RunCancelled("ComfyUI ends.")
            yield
        finally:
            self._lock.release()


class PoolHandle:
    """Starts the pool of a placement when it is needed. Nodes pass it around in place of a pool."""

    def __init__(
        self,
        placement: Placement,
        setup: RankSetup,
        before_start: Callable[[PoolHandle], None] = lambda handle: None,
        after_start: Callable[[WorkerPool], None] = lambda pool: None,
        starts: Starts | None = None,
    ):
        self.placement = placement
        self._setup = setup
        self._before_start = before_start
        self._after_start = after_start
        self._pool: WorkerPool | None = None
        self._starts = starts or Starts()

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def state(self) -> str:
        """Return closed, starting, ready, busy, or failed, also of a pool that is up without a
        rank.
        """
        pool = self._pool  # once: another thread may close it meanwhile, here and below
        return "closed" if pool is None else "failed" if pool.fault else pool.state

    @property
    def holds_devices(self) -> bool:
        """Return whether ranks are up, even if one of them was lost."""
        pool = self._pool
        return pool is not None and pool.state in ("ready", "busy")

    @property
    def fault(self) -> str:
        """Returns why the last pool cannot take requests if it lost ranks; else empty."""
        pool = self._pool
        return "" if pool is None else pool.fault

    def live(self) -> WorkerPool | None:
        """Returns the pool if it can take requests now; None if there is none or if it has lost a
        rank.
        """
        pool = self._pool
        return pool if pool is not None and pool.is_whole else None

    def ensure(self, interrupted: Callable[[], bool] = never) -> WorkerPool:
        """Returns the live pool, else a fresh one. Raises PoolFailed, RunCancelled."""
        pool = self.live()
        if pool is not None:
            return pool
        with self._starts.turn(interrupted):
            pool = self.live()
            if pool is None:  # no other thread has started it meanwhile
                stop_if(interrupted)
                if self._pool is not None:
                    self._pool.close()  # of one that lost a rank between runs, the others are still there
                self._before_start(self)
                pool = self._pool = WorkerPool(self.placement, self._setup)
                pool.start(interrupted)
                self._after_start(pool)
            return pool

    def close(self) -> None:
        with self._starts.turn():
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def kill(self) -> None:
        """Ends the ranks at once, even if another thread waits for them or starts them."""
        pool = self._pool
        if pool is not None:
            pool.ranks.kill()


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
        self._starts = Starts()
        weakref.finalize(self, kill_all, self._handles, self._starts)

    def handle(self, placement: Placement) -> PoolHandle:
        """May be called from any thread: all get the same handle."""
        known = self._handles.get(placement)
        if known is not None:
            return known
        return self._handles.setdefault(
            placement, PoolHandle(placement, self._setup, self._make_room, self._started, self._starts)
        )

    def handles(self) -> list[PoolHandle]:
        return list(self._handles.values())

    def _make_room(self, newcomer: PoolHandle) -> None:
        for handle in self.handles():
            shared = set(handle.placement.devices) & set(newcomer.placement.devices)
            if handle is not newcomer and shared and handle.holds_devices:
                handle.close()
                self._ended(handle.placement, newcomer.placement)

    def close(self) -> None:
        for handle in self.handles():
            handle.close()


def kill_all(handles: dict[Placement, PoolHandle], starts: Starts) -> None:
    """Ends every rank as ComfyUI ends. It waits for no request in flight: ranks hold nothing that
    has to be kept.
    """
    starts.are_over = True
    for handle in list(handles.values()):
        handle.kill()
