"""Ranks that share a CPU keep off each other's cores, and their message threads do not interrupt them."""

import os
from pathlib import Path

import pytest
from pipemesh.parallel_runtime.comm.cores import GIVE_WAY, giving_way


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_every_thread_of_a_rank_stays_on_its_own_cores_and_only_message_threads_give_way(clients):
    client = clients(2)
    pool = client._ensure(lambda: False).pool
    for rank, pid in enumerate(pool.pids):
        threads = sorted(int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())
        assert all(os.sched_getaffinity(thread) == set(pool.placement.cores(rank)) for thread in threads)
        behaviour = {thread: (os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)) for thread in threads}
        assert behaviour[pid] == (0, os.SCHED_OTHER)
        assert (GIVE_WAY, os.SCHED_BATCH) in behaviour.values()


def test_threads_that_were_there_before_do_not_give_way():
    with giving_way():
        pass
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
