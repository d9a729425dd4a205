"""Pools of fake ranks, and what tests ask of them."""

from __future__ import annotations

import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import EndRun, Forward, Load, Release, SetWeightPatches
from pipemesh.parallel_runtime.wire.segment import TensorRef
from pipemesh.parallel_runtime.wire.tcp import Hello
from pipemesh.pool.devices import Placement, place
from pipemesh.pool.listener import accept
from pipemesh.pool.package import VERSION
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.rank_setup import RankSetup
from pipemesh.pool.rendezvous import store_key
from pipemesh.pool.supervisor import process_of_its_own

from .at_once import DEADLINE_S

FAKE = str(Path(__file__).with_name("fake_worker.py"))
SECRET = "correct horse battery staple"
OUT = TensorRef(4096, (64,), "uint8")
TOO_LONG = 1 << 65  # of bits: no message takes such an integer
MAKE = {
    "Load": lambda number, model="m": Load(request=number, model=model, source=b""),
    "SetWeightPatches": lambda number: SetWeightPatches(
        request=number, model="m", patches_id="p", payload=b""
    ),
    "Release": lambda number, model="m": Release(request=number, model=model),
    "EndRun": lambda number, model="m": EndRun(request=number, model=model),
    "Forward": lambda number, model="m": forward(number, model),
    "unwritable Load": lambda number: Load(request=number, model="m", source=b"", stages=(TOO_LONG,)),
    "unwritable Forward": lambda number: forward(number, "m", TOO_LONG),
}


def forward(number: int, model: str, width: int = 1) -> Forward:
    return Forward(
        request=number,
        model=model,
        patches_id="",
        arguments=b"",
        out=OUT,
        part=Part(1, 0),
        width=width,
    )


def fake_setup(*rules: str, stall_s: float = DEADLINE_S) -> RankSetup:
    return RankSetup(
        comfyui="",
        stall_s=stall_s,
        argv=(sys.executable, FAKE, "{fd}", "{parent}", *rules),
        start=process_of_its_own,
    )


def cpus(ranks: int) -> Placement:
    return place(Layout(ulysses=ranks), "cpu", "gloo", ())


def stages(ranks: int) -> Placement:
    return place(Layout(pipefusion=ranks), "cpu", "gloo", ())


def spread(devices: str) -> Placement:
    """One sequence over the devices listed."""
    return place(Layout(ulysses=devices.count(",") + 1), devices, "gloo", ())


near_and_far = pytest.mark.parametrize("devices", ["cpu,cpu,cpu", "cpu,far/cpu,far/cpu"], ids=["near", "far"])


class FakeLeader:
    """A leader named ``far`` in this process, with fake ranks that keep these rules. ``setup``: of
    pools over it and this machine.
    """

    def __init__(self, *rules: str, secret: str = SECRET, version: str = VERSION):
        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
        rendezvous = f"127.0.0.1:{self.store.port}"
        self.setup = replace(fake_setup(*rules), rendezvous=rendezvous, secret=SECRET, lost_s=2.0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.store.set(store_key("far"), "{}:{}".format(*self._listener.getsockname()))
        hello, own = Hello(version=version, machine="far"), replace(self.setup, secret=secret)
        threading.Thread(target=accept, args=(self._listener, hello, own), daemon=True).start()

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()


class Pools:
    """``pools(ranks, rule, ...)`` is a pool of fake ranks that is ready: so many, on the devices
    listed, or placed so; all are closed in the end. ``made`` has not started.
    """

    def __init__(self):
        self._made: list[WorkerPool | FakeLeader] = []

    def leader(self, *rules: str, **options) -> FakeLeader:
        self._made.append(made := FakeLeader(*rules, **options))
        return made

    def made(self, ranks: int | str | Placement, *rules: str, **setup) -> WorkerPool:
        placement = (
            spread(ranks) if isinstance(ranks, str) else cpus(ranks) if isinstance(ranks, int) else ranks
        )
        is_far = bool(placement.other_machines)
        own = replace(self.leader(*rules).setup, **setup) if is_far else fake_setup(*rules, **setup)
        self._made.append(pool := WorkerPool(placement, own))
        return pool

    def __call__(self, ranks: int | str | Placement, *rules: str, **setup) -> WorkerPool:
        pool = self.made(ranks, *rules, **setup)
        pool.start()
        return pool

    def close(self) -> None:
        for one in reversed(self._made):
            one.close()


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__


def call(pool: WorkerPool, kind: str, interrupted=lambda: False) -> list:
    return pool.ask(MAKE[kind](pool.next_request()), (), interrupted)


def through(pool: WorkerPool, kind: str = "Forward") -> list:
    """An evaluation submitted to stages, and collected."""
    return collected(pool, submitted(pool, kind))


def submitted(pool: WorkerPool, kind: str = "Forward", group: tuple[int, ...] = (), rules: str = "") -> int:
    """The number of a request that was sent to ``group``, or to all ranks, which keep ``rules`` for
    it.
    """
    number = pool.next_request()
    pool.submit(MAKE[kind](number, **({"model": rules} if rules else {})), group or pool.facts.everyone)
    return number


def collected(pool: WorkerPool, number: int, interrupted=lambda: False) -> list:
    return list(pool.collect(number, interrupted).values())


def handled(pool: WorkerPool, kind: str = "Release") -> list[str]:
    """What each rank has handled so far, this request included."""
    return [reply.output.decode() for reply in call(pool, kind)]


def inside(pool: WorkerPool, phase: str):
    """An ``interrupted`` that says yes as soon as every rank is in ``phase``."""
    return lambda: all(pool.arena.board.phase(rank) == phase for rank in pool.facts.everyone)


def gate(pool: WorkerPool):
    return pool.arena.segment.tensor(TensorRef(8, (1,), "int64"))


def opens(pool: WorkerPool):
    """An ``interrupted`` that opens the gate and says no."""
    word = gate(pool)
    return lambda: bool(word.fill_(1)) and False


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def failing(ranks: int, *rules: str, kind: str, first: str = "Release", stall_s: float = DEADLINE_S) -> str:
    """The sentence of a pool that fails in a request of this kind; checks that nothing of it is
    left. ``stall_s`` holds for that request: to start takes long on a busy machine.
    """
    pool = WorkerPool(cpus(ranks), fake_setup(*rules))
    pool.start()
    call(pool, first)
    pids = pool.ranks.pids
    pool._conversation.stall_s = stall_s
    with pytest.raises(PoolFailed) as caught:
        call(pool, kind)
    assert_over(pool, pids)
    return str(caught.value)


def assert_over(pool: WorkerPool, pids: list[int]) -> None:
    assert pool.state == "failed"
    assert not any(map(is_alive, pids))
    with pytest.raises(PoolFailed, match=r"^The pool is failed: run again to start a fresh one\.$"):
        call(pool, "Release")
    pool.close()
    assert pool.state == "closed"
