"""Ranks that share a CPU keep off each other's cores, and their message threads do not interrupt
them.
"""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipemesh.parallel_runtime.comm.cores import GIVE_WAY, bus_of, cores_near, giving_way, keep_to

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


BUS = "0000:c1:00.0"


@pytest.mark.parametrize(
    ("node", "chosen", "expected"),
    [("1", range(8), (2, 3, 6)), ("-1", range(8), ()), ("1", range(4), ()), (None, range(8), ())],
    ids=["", "one node", "the user has chosen cores", "nothing is told"],
)
def test_a_gpus_rank_has_the_cores_near_its_gpu(tmp_path, monkeypatch, node, chosen, expected):
    gpu = tmp_path / "bus/pci/devices" / BUS
    online = tmp_path / "devices/system/cpu/online"
    for path, text in ((gpu / "local_cpulist", "2-3,6\n"), (gpu / "numa_node", node), (online, "0-7\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(chosen))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert bus_of(properties) == BUS and cores_near(BUS, tmp_path) == expected
    assert bus_of(SimpleNamespace()) == "" and cores_near("", tmp_path) == ()
