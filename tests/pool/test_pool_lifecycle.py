"""The pool's life, played with fake ranks: its states, cancel, close, handles and the keeper. No
pool stays busy for ever, and Stop is heard however a rank hangs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import psutil
import pytest
from pipemesh.parallel_runtime.client.session import Sessions
from pipemesh.parallel_runtime.errors import ModelError, PipeMeshError, PoolSpent, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool import conversation, verdict
from pipemesh.pool import handle as handles
from pipemesh.pool.devices import Device, Placement, place
from pipemesh.pool.handle import PoolHandle, PoolKeeper
from pipemesh.pool.pool import WorkerPool

from ..kit.at_once import Threads, returns
from ..kit.fake_pools import (
    DEADLINE_S,
    call,
    cpus,
    fake_setup,
    gate,
    handled,
    inside,
    is_alive,
    near_and_far,
    opens,
    stages,
    submitted,
)
from ..kit.holdings import NOTHING, Holdings

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


# -- states


def test_a_pool_is_starting_then_ready_busy_while_it_works_then_closed(started):
    pool = started.made(2, "*:Load=gated")
    assert (pool.state, pool.ranks.pids) == ("starting", [])
    pool.start()
    pids, seen = pool.ranks.pids, []
    assert pool.state == "ready" and len(set(pids)) == 2 and all(map(is_alive, pids))
    assert [(one.free, one.total, one.model) for one in pool.memory] == [(3 << 20, 4 << 20, 1 << 20)] * 2
    replies = call(pool, "Load", lambda: seen.append(pool.state) or (len(seen) > 2 and opens(pool)()))
    assert [reply.request for reply in replies] == [1, 1]
    assert set(seen[1:]) == {"busy"} and pool.state == "ready"
    pool.close()
    assert pool.state == "closed" and not any(map(is_alive, pids))
    assert [pool.ranks._crew.supervisor.exit_of(rank, 0) for rank in (0, 1)] == [0, 0], "of themselves"


# -- cancel


def test_a_run_cancelled_before_it_is_sent_never_reaches_the_ranks(started):
    pool = started(2)
    with pytest.raises(RunCancelled):
        call(pool, "Load", lambda: True)
    assert handled(pool) == ["Start Release"] * 2


@near_and_far
def test_cancel_while_loading_returns_at_once_and_the_next_call_collects_first(started, devices):
    pool = started(devices, "*:Load=slow", "0:Load=gated")
    with pytest.raises(RunCancelled, match=r"^The run was cancelled\.$"):
        call(pool, "Load", inside(pool, "loading"))
    assert pool.state == "ready" and all(map(is_alive, filter(None, pool.ranks.pids)))
    assert pool.ranks.has_lost_one(pool.idle) is False, "what it will still say is no loss"
    replies = call(pool, "Forward", opens(pool))
    assert [(reply.request, reply.output) for reply in replies] == [(2, b"Start Load Forward")] * 3
    assert pool.state == "ready"


@near_and_far
def test_cancel_in_a_forward_calls_every_rank_of_its_group_back_and_others_hear_nothing(started, devices):
    pool = started(devices, "*:Forward=cancellable")
    call(pool, "Release")
    number = submitted(pool, group=(0, 2))
    with pytest.raises(RunCancelled):
        pool.collect(number, lambda: pool.state == "busy")
    assert pool.arena.board.cancelled_request == number
    assert pool.state == "ready" and pool.idle
    group, others = "Start Release Forward Release", "Start Release Release"
    assert handled(pool) == [group, others, group]  # and the stale cancel word stops nothing


# -- close


def test_a_rank_that_does_not_leave_is_ended_after_the_grace(started):
    pool = started(2, "1:Close=hang")
    pool.close(grace_s=1.5)
    assert [pool.ranks._crew.supervisor.exit_of(rank, 0) for rank in (0, 1)] == [0, -9]


def test_a_second_threads_call_waits_for_the_first(started):
    pool, second = started(2, "*:Load=gated"), Threads()
    answers: list[list[str]] = []
    looks = count()

    def interrupted() -> bool:
        """Runs inside the first call: starts the second, sees it wait, then opens the gate."""
        if inside(pool, "loading")() and (look := next(looks)) in (0, 5):
            second(lambda: answers.append(handled(pool))) if look == 0 else opens(pool)()
            assert not answers
        return False

    assert [reply.output for reply in call(pool, "Load", interrupted)] == [b"Start Load"] * 2
    second.join()
    assert answers == [["Start Load Release"] * 2]


# -- handles and the keeper


@pytest.fixture
def keeper():
    keeper = PoolKeeper(fake_setup("1:Forward=die"))
    yield keeper
    keeper.close()


def test_stop_while_a_pool_ends_for_a_lack_of_memory_starts_no_worker_and_the_next_run_has_a_pool(brief):
    """Pressed while the other rank is waited for, or killed: heard before a fresh pool starts."""
    before, launched = Holdings.now(), []
    setup = fake_setup("0:Forward=uneven-memory", "1:Forward=hang")
    launch = lambda command: launched.append(command) or setup.start(command)  # noqa: E731
    handle = PoolHandle(cpus(2), replace(setup, start=launch))
    with pytest.raises(PoolSpent, match=r"^Rank 0 on cpu ran out of memory while computing"):
        call(handle.ensure(), "Forward")
    left = Holdings.now().since(before)
    for _again in range(2):
        with pytest.raises(RunCancelled):
            handle.ensure(lambda: True)
    assert (left, handle.state, len(launched)) == (NOTHING, "failed", 2)
    assert call(handle.ensure(), "Load") and len(launched) == 4
    handle.close()
    assert Holdings.now().since(before) == NOTHING


def test_what_is_left_of_a_pool_that_lost_a_rank_makes_room_too(keeper):
    handle = keeper.handle(cpus(3))
    first = handle.ensure()
    pids = first.ranks.pids
    psutil.Process(pids[1]).kill()
    first.ranks._crew.supervisor.exit_of(1, DEADLINE_S)
    assert handle.state == "failed", "whoever asks is told, though the others are up"
    keeper.handle(cpus(2)).ensure()
    assert not any(map(is_alive, pids))


def gpus(*indices: int) -> Placement:
    own = tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(4))
    return place(Layout(ulysses=len(indices)), ",".join(own[one].name for one in indices), "gloo", own)


def test_pools_live_side_by_side_on_different_devices_and_one_makes_room_for_another_on_its_own(keeper):
    for placement, states in (
        (gpus(0, 1), ["ready"]),
        (gpus(2), ["ready", "ready"]),
        (gpus(1, 2), ["closed", "closed", "ready"]),
        (gpus(0, 1), ["ready", "closed", "closed"]),
    ):
        handle = keeper.handle(placement)
        assert handle.state == "closed" and handle.live() is None
        pool = handle.ensure()
        assert handle.ensure() is handle.live() is pool and keeper.handle(placement) is handle
        assert [handle.state for handle in keeper.handles()] == states
    keeper.close()
    assert keeper.handle(gpus(0, 1)).state == "closed"


# -- asked by several threads at once


class SlowPool:
    """A pool without ranks that is up once ``go`` is set. ``said``: what became of all of them."""

    ranks = SimpleNamespace(kill=lambda: None)
    fault = ""

    def __init__(self, placement: Placement, setup):
        self.name, self.setup = placement.layout.equation(), setup
        self.state = "starting"

    @property
    def is_whole(self):
        return self.state == "ready"

    def start(self, interrupted):
        self.setup.said.append(f"{self.name} starts")
        self.setup.has_begun.set()
        assert self.setup.go.wait(DEADLINE_S)
        self.state = "ready"
        self.setup.said.append(f"{self.name} is up")

    def close(self):
        self.state = "closed"
        self.setup.said.append(f"{self.name} is closed")


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(handles, "WorkerPool", SlowPool)
    return SimpleNamespace(said=[], go=threading.Event(), has_begun=threading.Event())


def test_of_two_pools_that_need_one_device_the_second_starts_when_the_first_has_made_room(slow):
    keeper, threads = PoolKeeper(slow), Threads()
    threads(keeper.handle(cpus(1)).ensure)
    assert slow.has_begun.wait(DEADLINE_S)
    slow.has_begun.clear()
    waits = slow.has_begun  # set by whoever waits for a turn, and by a second start that does not wait
    threads(lambda: keeper.handle(cpus(2)).ensure(lambda: waits.set() is not None))
    assert waits.wait(DEADLINE_S)
    slow.go.set()
    threads.join()
    one, two = "ulysses 1 = 1 rank", "ulysses 2 = 2 ranks"
    assert threads.ended == [None, None]
    assert slow.said == [f"{one} starts", f"{one} is up", f"{one} is closed", f"{two} starts", f"{two} is up"]


def test_who_waits_for_another_threads_start_can_be_cancelled(slow):
    keeper, threads = PoolKeeper(slow), Threads()
    threads(keeper.handle(cpus(1)).ensure)
    assert slow.has_begun.wait(DEADLINE_S)
    for ranks in (1, 2):
        with pytest.raises(RunCancelled):
            keeper.handle(cpus(ranks)).ensure(lambda: True)
    slow.go.set()
    threads.join()
    assert keeper.handle(cpus(1)).ensure().state == "ready"


def test_handles_may_be_asked_for_while_another_pool_makes_room(slow):
    slow.go.set()
    keeper = PoolKeeper(slow, lambda old, new: keeper.handle(cpus(3)))
    for ranks in (1, 2):
        keeper.handle(cpus(ranks)).ensure()
    assert [handle.state for handle in keeper.handles()] == ["closed", "ready", "closed"]


def test_all_threads_get_the_same_handle(monkeypatch, slow):
    """The second asks at the moment when the first makes one."""
    keeper, others, real = PoolKeeper(slow), [], handles.PoolHandle

    def asked_for_meanwhile(*args):
        monkeypatch.setattr(handles, "PoolHandle", real)
        others.append(keeper.handle(cpus(1)))
        return real(*args)

    monkeypatch.setattr(handles, "PoolHandle", asked_for_meanwhile)
    assert [keeper.handle(cpus(1))] == others == keeper.handles()


@pytest.mark.parametrize("reads", range(4))
@pytest.mark.parametrize("ask", ["state", "holds_devices", "fault", "live"])
def test_a_pool_that_another_thread_closes_meanwhile_is_no_error(slow, ask, reads):
    class Leaving(PoolHandle):
        """After so many looks there is no pool any more."""

        looks = 0

        @property
        def _pool(self):
            self.looks += 1
            return there if self.looks <= reads else None

        @_pool.setter
        def _pool(self, pool):
            assert pool is None

    there = SlowPool(cpus(1), slow)
    found = getattr(Leaving(cpus(1), slow), ask)
    assert (found() if callable(found) else found) in ("starting", "closed", False, "", None)


# -- the end of ComfyUI


def killed(keeper: PoolKeeper) -> None:
    """As at the end of the process, by the function that is called then."""
    handles.kill_all(keeper._handles, keeper._starts)


@pytest.mark.parametrize(
    ("kind", "rule", "phase"), [("Forward", "hang", "computing"), ("Load", "gated", "loading")]
)
def test_at_the_end_of_comfyui_ranks_are_ended_first_and_who_waits_for_them_is_cancelled(kind, rule, phase):
    """A failure would make auto mode start another pool, and ComfyUI show a traceback."""
    keeper, threads, at_work = PoolKeeper(fake_setup(f"*:{kind}={rule}")), Threads(), threading.Event()
    pool = keeper.handle(cpus(2)).ensure()
    pids, busy = pool.ranks.pids, inside(pool, phase)
    threads(lambda: call(pool, kind, lambda: bool(busy() and at_work.set())))
    assert at_work.wait(DEADLINE_S)
    killed(keeper)
    threads.join()
    assert [type(error) for error in threads.ended] == [RunCancelled]
    assert not any(map(is_alive, pids)) and pool.state == "closed"
    with pytest.raises(RunCancelled, match=r"^ComfyUI ends\.$"):
        keeper.handle(cpus(1)).ensure()


def test_a_pool_that_is_starting_ends_with_comfyui_too():
    keeper, threads, at_work = PoolKeeper(fake_setup("1:Start=gated")), Threads(), threading.Event()
    handle = keeper.handle(cpus(2))

    def asked():
        pool = handle._pool
        if pool is not None and pool.arena.board.phase(1) == "importing":
            at_work.set()
        return False

    threads(lambda: handle.ensure(asked))
    assert at_work.wait(DEADLINE_S)
    killed(keeper)
    threads.join()
    assert [type(error) for error in threads.ended] == [RunCancelled]


# -- Stop, with a rank that hangs or is slow


@pytest.fixture
def handle_of():
    """(placement, rule, ...) -> a handle of fake ranks; those that hang are not found out in a
    test's time, but where they were told to leave.
    """
    made = []

    def of(placement, *rules: str) -> PoolHandle:
        made.append(PoolHandle(placement, fake_setup(*rules, stall_s=NEVER_S)))
        return made[-1]

    yield of
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

    by_itself = returns(run)
    if not by_itself:
        pool.ranks.kill()
    return by_itself


ONE, ALL_RANKS = ("0:Forward=cancellable", "1:Forward=hang"), ("*:Forward=hang",)


@pytest.mark.parametrize(
    ("placement", "rules", "stopped"),
    [(stages(2), ONE, True), (stages(2), ALL_RANKS, False), (cpus(2), ONE, True), (cpus(2), ALL_RANKS, True)],
    ids=["a stage at stop", "all stages at an error in the UI", "a rank at stop", "all ranks at stop"],
)
@pytest.mark.usefixtures("brief", "found_out")
def test_ranks_that_hang_are_not_waited_for_when_they_are_abandoned_and_the_next_run_has_a_fresh_pool(
    handle_of, placement, rules, stopped, caplog
):
    handle = handle_of(placement, *rules)
    pool = handle.ensure()
    first, _second = submitted(pool), submitted(pool)
    if stopped:
        with pytest.raises(RunCancelled):
            pool.collect(first, inside(pool, "computing"))
    assert ends(pool, pool.abandon)
    assert ends(pool, lambda: next_pool(handle))
    assert handled(handle.ensure()) == ["Start Release"] * 2
    sentence = r"A cancelled request ended with: Rank [01] on cpu made no progress for 0\.4 s while computing"
    assert re.search(sentence, caplog.text)


@pytest.mark.parametrize(
    ("placement", "deed", "collects"),
    [(cpus(2), "silent", True), (stages(2), "silent", False), (stages(2), "gated", False)],
    ids=["silent", "silent stages", "slow stages"],
)
@pytest.mark.usefixtures("brief")
def test_ranks_that_are_slow_to_leave_or_silent_are_not_waited_for_and_stay_warm(
    handle_of, placement, deed, collects
):
    """As GPU ranks are that wait for all they have enqueued. Stages count: what they were at is
    collected when they are needed again.
    """
    handle = handle_of(placement, f"*:Forward={deed}")
    pool = handle.ensure()
    number = submitted(pool)
    if collects:
        with pytest.raises(RunCancelled):
            pool.collect(number, inside(pool, "computing"))
    assert ends(pool, pool.abandon)
    assert handle.ensure() is pool
    assert next_pool(handle, opens(pool)) is pool
    assert handled(pool) == ["Start Forward Release"] * 2


@pytest.mark.usefixtures("brief")
def test_stop_pressed_again_and_again_does_not_begin_the_judgement_of_a_hang_anew(handle_of):
    pool = handle_of(cpus(2), "*:Load=hang").ensure()
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
def test_a_deadline_for_leaving_is_that_of_one_stop_and_not_of_what_follows(handle_of):
    pool = handle_of(cpus(2)).ensure()
    with pytest.raises(RunCancelled):
        pool.collect(submitted(pool, rules="*:Forward=cancellable"), inside(pool, "computing"))
    number, looks = submitted(pool, rules="*:Forward=silent"), count()
    assert len(pool.collect(number, lambda: next(looks) > 20 and opens(pool)())) == 2


@pytest.mark.usefixtures("brief")
def test_a_group_that_is_slow_is_left_alone_where_another_fails(handle_of):
    pool = handle_of(cpus(2)).ensure()
    slow = submitted(pool, group=(0,), rules="0:Forward=gated")
    failing = submitted(pool, group=(1,), rules="1:Forward=error")
    with pytest.raises(ModelError, match="Rank 1"):
        pool.collect(failing)
    gate(pool).fill_(1)
    assert sorted(pool.collect(slow)) == [0]
    assert handled(pool) == ["Start Forward Release"] * 2
