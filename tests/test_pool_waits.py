"""No pool stays busy for ever, and Stop is heard however a rank hangs; played with fake ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from pipemesh.launcher.pool import conversation, verdict
from pipemesh.launcher.pool.handle import PoolHandle
from pipemesh.launcher.pool.pool import WorkerPool
from pipemesh.parallel_runtime.errors import PipeMeshError, RunCancelled

from .fake_pools import DEADLINE_S, call, cpus, fake_setup, handled, inside, opens, stages, submitted, through

NEVER_S = 100 * DEADLINE_S  # as good as no limit: what waits for it is ended by the test


@pytest.fixture
def brief(monkeypatch):
    """The waits for other ranks are short: these ranks will not answer."""
    monkeypatch.setattr(verdict, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(conversation, "CANCEL_WAIT_S", 0.2)


@pytest.fixture
def handle():
    """(placement, rule, ...) -> a handle of fake ranks; those that hang are not found out in a
    test's time.
    """
    made = []

    def handle(placement, *rules: str) -> PoolHandle:
        made.append(PoolHandle(placement, fake_setup(*rules, stall_s=NEVER_S)))
        return made[-1]

    yield handle
    for one in made:
        one.close()


def ends(pool: WorkerPool, act: Callable[[], object]) -> bool:
    """Whether ``act`` ends by itself although a rank hangs; else the ranks are killed, so that it
    does.
    """

    def run() -> None:
        with suppress(PipeMeshError):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    by_itself = not thread.is_alive()
    for pid in [] if by_itself else pool.ranks.pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    thread.join()
    return by_itself


# -- a request that cannot be written


@pytest.mark.parametrize("placement", [cpus(2), stages(2)], ids=["whole", "in patches"])
@pytest.mark.parametrize(("act", "kind"), [(call, "unwritable Load"), (call, "unwritable Forward"), (through, "unwritable Forward")])
def test_a_request_that_cannot_be_written_leaves_the_pool_ready(started, placement, act, kind):
    """Integers of more than 64 bits cannot: the ranks hear nothing of it."""
    pool = started(placement)
    with pytest.raises((OverflowError, PipeMeshError)):
        act(pool, kind)
    assert pool.state == "ready"
    assert handled(pool) == ["Start Release"] * 2


def test_a_patch_that_cannot_be_written_leaves_those_before_it_on_their_way(started):
    pool = started(stages(2))
    first = submitted(pool)
    with pytest.raises((OverflowError, PipeMeshError)):
        submitted(pool, "unwritable Forward")
    assert len(pool.collect(first)) == 2
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 2


# -- Stop, with a rank that hangs


@pytest.mark.parametrize("rules", [("0:Forward=cancellable", "1:Forward=hang"), ("*:Forward=hang",)], ids=["one hangs", "all hang"])
@pytest.mark.parametrize("stopped", [True, False], ids=["stop", "an error in the UI"])
@pytest.mark.usefixtures("brief")
def test_stages_that_hang_are_not_waited_for_when_patches_are_abandoned_and_the_next_run_has_a_fresh_pool(handle, rules, stopped):
    handle = handle(stages(2), *rules)
    pool = handle.ensure()
    first, _second = submitted(pool), submitted(pool)
    if stopped:
        with pytest.raises(RunCancelled):
            pool.collect(first, inside(pool, "computing"))
    assert ends(pool, pool.abandon)
    assert ends(pool, handle.ensure)
    assert handled(handle.ensure()) == ["Start Release"] * 2


@pytest.mark.parametrize("rules", [("0:Forward=cancellable", "1:Forward=hang"), ("*:Forward=hang",)], ids=["one hangs", "all hang"])
@pytest.mark.usefixtures("brief")
def test_the_run_after_one_that_was_stopped_while_a_rank_hung_has_a_fresh_pool_and_waits_for_nothing(handle, rules):
    handle = handle(cpus(2), *rules)
    pool = handle.ensure()
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "computing"))
    said = []
    assert ends(pool, lambda: said.extend(handled(handle.ensure())))
    assert said == ["Start Release"] * 2


@pytest.mark.usefixtures("brief")
def test_stages_that_are_slow_to_leave_are_not_waited_for_either_and_stay_warm(handle):
    """They count: what they were at is collected when they are needed again."""
    handle = handle(stages(2), "*:Forward=gated")
    pool = handle.ensure()
    submitted(pool)
    assert ends(pool, pool.abandon)
    assert handle.ensure() is pool
    assert [reply.output for reply in call(pool, "Release", opens(pool))] == [b"Start Forward Release"] * 2
