"""Pools of fake ranks, and what tests ask of them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import EndRun, Forward, Load, Release, SetWeightPatches
from pipemesh.parallel_runtime.wire.segment import TensorRef
from pipemesh.pool.devices import Placement, place
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.rank_setup import RankSetup
from pipemesh.pool.supervisor import process_of_its_own

FAKE = str(Path(__file__).with_name("fake_worker.py"))
DEADLINE_S = 60.0  # only ever reached by a test that fails
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


class Pools:
    """``pools(ranks, rule, ...)`` is a pool of fake ranks that is ready, so many or placed so; all
    are closed in the end.
    """

    def __init__(self):
        self._made: list[WorkerPool] = []

    def __call__(self, ranks: int | Placement, *rules: str, **setup) -> WorkerPool:
        pool = WorkerPool(cpus(ranks) if isinstance(ranks, int) else ranks, fake_setup(*rules, **setup))
        self._made.append(pool)
        pool.start()
        return pool

    def close(self) -> None:
        for pool in self._made:
            pool.close()


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
