"""Restart a pool, or free the memory that it holds, between two runs: never during one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...parallel_runtime.client.remote_pool import RemotePool
from ...parallel_runtime.errors import PipeMeshError
from ...pool.handle import PoolHandle
from ..runtime import Runtime
from .collection import pool_id

WAIT_S = 1.0  # for a run that begins at this moment


class Unknown(PipeMeshError):
    """No pool has this id."""

    code = 404  # of the answer to a POST


class Busy(PipeMeshError):
    """A run goes on; the pools are as they were."""

    code = 409


class PoolControl:
    """Acts on pools from the server's threads. ``is_executing``: ComfyUI runs a prompt now."""

    def __init__(self, runtime: Runtime, is_executing: Callable[[], bool]):
        self._runtime = runtime
        self._is_executing = is_executing

    def restart(self, identity: str) -> tuple[PoolHandle, RemotePool]:
        """Ends the ranks of a pool and starts fresh ones. Raises Unknown, Busy, PoolFailed."""
        with self._between_runs(identity) as (handle, pool):
            handle.close()
            handle.ensure()
            return handle, pool

    def unload(self, identity: str) -> tuple[PoolHandle, RemotePool]:
        """Frees every model that a pool holds; its ranks stay. Raises Unknown, Busy."""
        with self._between_runs(identity) as (handle, pool):
            for model in list(session.models) if (session := pool.sessions.live) is not None else ():
                pool.residency.release(model)
            return handle, pool

    def release(self, identity: str) -> tuple[PoolHandle, RemotePool]:
        """Ends the ranks of a pool, so that its devices are free; the next run starts fresh ones.
        Raises Unknown, Busy.
        """
        with self._between_runs(identity) as (handle, pool):
            handle.close()
            return handle, pool

    @property
    def is_busy(self) -> bool:
        """Returns whether nothing can be done to any pool now."""
        return self._runtime.turn.locked() or self._samples()

    def _samples(self) -> bool:
        return self._is_executing() and any(
            is_at_work(handle, pool) for handle, pool in self._runtime.pools()
        )

    @contextmanager
    def _between_runs(self, identity: str) -> Iterator[tuple[PoolHandle, RemotePool]]:
        """Keeps runs from beginning. All pools wait: starting one may end another, where they share
        a device.
        """
        found = {pool_id(handle.placement): (handle, pool) for handle, pool in self._runtime.pools()}
        if identity not in found:
            raise Unknown(f"No pool has the id {identity}: GET /pipemesh/status lists them.")
        turn: threading.Lock = self._runtime.turn
        if not turn.acquire(timeout=WAIT_S):
            raise Busy("A pool is being restarted: ask again when it is ready.")
        try:
            if self._samples():
                raise Busy("A pool samples now: press Stop first, or wait for the end of the run.")
            yield found[identity]
        finally:
            turn.release()


def is_at_work(handle: PoolHandle, pool: RemotePool) -> bool:
    return handle.state in ("starting", "busy") or any(
        run.is_sampled and not run.ended_s for run in list(pool.runs.recent)
    )
