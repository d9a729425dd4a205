"""No pool stays busy for ever, and Stop is heard however a rank hangs; played with fake ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import psutil
import pytest
from pipemesh.parallel_runtime.client.session import Sessions
from pipemesh.parallel_runtime.errors import ModelError, PipeMeshError, RunCancelled
from pipemesh.pool import conversation, verdict
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.pool import WorkerPool

from ..kit.fake_pools import (
    DEADLINE_S,
    call,
    cpus,
    fake_setup,
    gate,
    handled,
    inside,
    opens,
    stages,
    submitted,
)

NEVER_S = 100 * DEADLINE_S  # as good as no limit: what waits for it is ended by the test


@pytest.fixture
def brief(monkeypatch):
    """The waits for other ranks are short: these ranks will not answer."""
    monkeypatch.setattr(verdict, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(conversation, "CANCEL_WAIT_S", 0.2)


@pytest.fixture
def found_out(monkeypatch):
    """Ranks that were told to leave and hang are soon found out."""
    monkeypatch.setattr(conversation, "LEAVE_STALLS_AFTER", 0.4 / NEVER_S)


@pytest.fixture
def handle():
    """(placement, rule, ...) -> a handle of fake ranks; those that hang are not found out in a
    test's time, but where they were told to leave.
    """
    made = []

    def handle(placement, *rules: str) -> PoolHandle:
        made.append(PoolHandle(placement, fake_setup(*rules, stall_s=NEVER_S)))
        return made[-1]

    yield handle
    for one in made:
        one.close()


def next_pool(handle: PoolHandle, interrupted: Callable[[], bool] = lambda: False) -> WorkerPool:
    """The pool of the next run, which waits first for what the last one left."""
    Sessions(handle).settle(interrupted)
    return handle.ensure()


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


def test_a_patch_that_cannot_be_written_leaves_those_before_it_on_their_way(started):
    pool = started(stages(2))
    first = submitted(pool)
    with pytest.raises((OverflowError, PipeMeshError)):
        submitted(pool, "unwritable Forward")
    assert len(pool.collect(first)) == 2
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 2


# -- Stop, with a rank that hangs


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "rules", [("0:Forward=cancellable", "1:Forward=hang"), ("*:Forward=hang",)], ids=["one hangs", "all hang"]
)
@pytest.mark.parametrize("stopped", [True, False], ids=["stop", "an error in the UI"])
@pytest.mark.usefixtures("brief", "found_out")
def test_stages_that_hang_are_not_waited_for_when_patches_are_abandoned_and_the_next_run_has_a_fresh_pool(
    handle, rules, stopped
):
    handle = handle(stages(2), *rules)
    pool = handle.ensure()
    first, _second = submitted(pool), submitted(pool)
    if stopped:
        with pytest.raises(RunCancelled):
            pool.collect(first, inside(pool, "computing"))
    assert ends(pool, pool.abandon)
    assert ends(pool, lambda: next_pool(handle))
    assert handled(handle.ensure()) == ["Start Release"] * 2


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "rules", [("0:Forward=cancellable", "1:Forward=hang"), ("*:Forward=hang",)], ids=["one hangs", "all hang"]
)
@pytest.mark.usefixtures("brief", "found_out")
def test_the_run_after_one_that_was_stopped_while_a_rank_hung_has_a_fresh_pool(handle, rules, caplog):
    handle = handle(cpus(2), *rules)
    pool = handle.ensure()
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "computing"))
    said = []
    assert ends(pool, lambda: said.extend(handled(next_pool(handle))))
    assert said == ["Start Release"] * 2
    assert re.search(
        r"A cancelled request ended with: Rank [01] on cpu made no progress for 0\.4 s while computing",
        caplog.text,
    )


@pytest.mark.usefixtures("brief")
def test_stages_that_are_slow_to_leave_are_not_waited_for_either_and_stay_warm(handle):
    """They count: what they were at is collected when they are needed again."""
    handle = handle(stages(2), "*:Forward=gated")
    pool = handle.ensure()
    submitted(pool)
    assert ends(pool, pool.abandon)
    assert handle.ensure() is pool
    assert [reply.output for reply in call(pool, "Release", opens(pool))] == [b"Start Forward Release"] * 2


@pytest.mark.cover(2)
@pytest.mark.parametrize(("placement", "collects"), [(cpus(2), True), (stages(2), True), (stages(2), False)])
@pytest.mark.usefixtures("brief")
def test_ranks_that_are_silent_for_longer_than_a_stop_waits_stay_warm(handle, placement, collects):
    """As GPU ranks are that wait for all they have enqueued."""
    handle = handle(placement, "*:Forward=silent")
    pool = handle.ensure()
    number = submitted(pool)
    if collects:
        with pytest.raises(RunCancelled):
            pool.collect(number, inside(pool, "computing"))
    assert ends(pool, pool.abandon)
    assert next_pool(handle, opens(pool)) is pool
    assert handled(pool) == ["Start Forward Release"] * 2


@pytest.mark.usefixtures("brief")
def test_stop_pressed_again_and_again_does_not_begin_the_judgement_of_a_hang_anew(handle):
    pool = handle(cpus(2), "*:Load=hang").ensure()
    with pytest.raises(RunCancelled):
        call(pool, "Load", inside(pool, "loading"))
    pool._conversation.stall_s = 0.5  # not before: to start takes long on a busy machine

    def settled() -> None:
        while pool.state == "ready":
            with suppress(RunCancelled):
                pool.settle(lambda: True)

    assert ends(pool, settled)
    assert pool.state == "failed"


@pytest.mark.usefixtures("brief", "found_out")
def test_a_deadline_for_leaving_is_that_of_one_stop_and_not_of_what_follows(handle):
    handle = handle(cpus(2))
    pool = handle.ensure()
    with pytest.raises(RunCancelled):
        pool.collect(submitted(pool, rules="*:Forward=cancellable"), inside(pool, "computing"))
    number, looks = submitted(pool, rules="*:Forward=silent"), count()
    assert len(pool.collect(number, lambda: next(looks) > 20 and opens(pool)())) == 2


@pytest.mark.usefixtures("brief")
def test_a_group_that_is_slow_is_left_alone_where_another_fails(handle):
    handle = handle(cpus(2))
    pool = handle.ensure()
    slow, failing = (
        submitted(pool, group=(0,), rules="0:Forward=gated"),
        submitted(pool, group=(1,), rules="1:Forward=error"),
    )
    with pytest.raises(ModelError, match="Rank 1"):
        pool.collect(failing)
    gate(pool).fill_(1)
    assert sorted(pool.collect(slow)) == [0]
    assert handled(pool) == ["Start Forward Release"] * 2
