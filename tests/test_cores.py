"""Ranks that share a CPU keep off each other's cores, and their message threads do not interrupt
them.
"""

import os
import threading
from pathlib import Path

import pytest
from pipemesh.parallel_runtime.comm.cores import GIVE_WAY, giving_way, keep_to

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_every_thread_of_a_rank_stays_on_its_own_cores_and_only_message_threads_give_way(clients):
    client = clients(2)
    pool = client.sessions.open(lambda: False).pool
    own = niceness(0)
    for rank, pid in enumerate(pool.ranks.pids):
        threads = sorted(int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())
        assert all(os.sched_getaffinity(thread) == set(pool.placement.cores(rank)) for thread in threads)
        assert (niceness(pid), os.sched_getscheduler(pid)) == (own, os.sched_getscheduler(0))
        assert (max(own, GIVE_WAY), os.SCHED_BATCH) in {
            (niceness(thread), os.sched_getscheduler(thread)) for thread in threads
        }


class Waiting(threading.Thread):
    """A thread that is there until the test is over."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.there = threading.Event(), threading.Event()
        self.start()
        self.there.wait()

    def run(self) -> None:
        self.there.set()
        self.over.wait()


def test_threads_that_were_there_before_do_not_give_way_and_a_lower_weight_is_never_raised(monkeypatch):
    asked = {}
    monkeypatch.setattr(os, "setpriority", lambda kind, thread, value: asked.update({thread: value}))
    monkeypatch.setattr(os, "getpriority", lambda kind, thread: 15)
    before = Waiting()
    with giving_way():
        inside = Waiting()
    assert asked == {inside.native_id: 15}
    before.over.set()
    inside.over.set()


def test_a_system_that_forbids_all_this_only_costs_speed(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    for name in ("setpriority", "sched_setaffinity", "sched_setscheduler"):
        monkeypatch.setattr(os, name, forbidden)
    keep_to((0,))
    with giving_way():
        thread = Waiting()
    thread.over.set()
