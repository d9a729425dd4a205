"""The pool's life, played with fake ranks: its states, cancel, close, handles and the keeper."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
from pipemesh.launcher.pool import conversation, verdict
from pipemesh.launcher.pool.devices import Device, Placement, place
from pipemesh.launcher.pool.handle import PoolHandle, PoolKeeper
from pipemesh.launcher.pool.pool import WorkerPool
from pipemesh.parallel_runtime.errors import LayoutError, PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.layout import Layout

from .fake_pools import (
    DEADLINE_S,
    call,
    cpus,
    failing,
    fake_setup,
    gate,
    handled,
    inside,
    is_alive,
    opens,
    submitted,
)


@pytest.fixture
def brief(monkeypatch):
    """The waits for other ranks are short: these ranks will not answer."""
    monkeypatch.setattr(verdict, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(conversation, "CANCEL_WAIT_S", 0.2)


# -- states


@pytest.fixture
def history(monkeypatch):
    """Every state entered, in order."""
    entered = []
    enter = WorkerPool._enter
    monkeypatch.setattr(
        WorkerPool, "_enter", lambda pool, state: (entered.append(state), enter(pool, state))[1]
    )
    return entered


def test_a_pool_is_starting_then_ready_then_closed(started, history):
    pool = WorkerPool(cpus(2), fake_setup())
    assert pool.state == "starting"
    assert pool.ranks.pids == []
    pool.start()
    assert len(set(pool.ranks.pids)) == 2
    assert all(map(is_alive, pool.ranks.pids))
    assert [(memory.free, memory.total, memory.model) for memory in pool.memory] == [
        (3 << 20, 4 << 20, 1 << 20)
    ] * 2
    replies = call(pool, "Load")
    assert [reply.request for reply in replies] == [1, 1]
    pids = pool.ranks.pids
    pool.close()
    assert not any(map(is_alive, pids))
    assert history == ["ready", "closed"]


def test_a_pool_is_busy_while_it_works(started):
    pool = started(2, "*:Load=slow")
    seen = []
    call(pool, "Load", lambda: seen.append(pool.state))
    assert set(seen[1:]) == {"busy"}
    assert pool.state == "ready"


def test_a_failure_goes_through_failed_to_closed(history):
    failing(2, "1:Load=die", kind="Load")
    assert history == ["ready", "failed", "closed"]


def test_answers_come_in_rank_order(started):
    pool = started(3, "0:Load=slow")
    assert handled(pool, "Load") == ["Start Load"] * 3
    assert handled(pool, "Forward") == ["Start Load Forward"] * 3


def test_a_request_goes_to_its_group_alone_and_groups_work_side_by_side(started):
    pool = started(3, "2:Forward=gated")
    slow, quick = submitted(pool, group=(2,)), submitted(pool, group=(0, 1))
    assert sorted(pool.collect(quick)) == [0, 1], "the other group is still at its own"
    gate(pool).fill_(1)
    assert sorted(pool.collect(slow)) == [2]
    assert handled(pool) == ["Start Forward Release"] * 3


def test_a_group_that_fails_alike_leaves_the_other_and_the_pool_alone(started):
    pool = started(4, "0:Forward=refuse", "1:Forward=refuse")
    other, failing = submitted(pool, group=(2, 3)), submitted(pool, group=(0, 1))
    with pytest.raises(Refused):
        pool.collect(failing)
    assert pool.state in ("ready", "busy")
    pool.abandon()
    assert handled(pool) == ["Start Forward Release"] * 4
    assert other != failing


def test_more_ranks_than_the_board_has_lines_for_are_refused_with_the_equation():
    with pytest.raises(
        LayoutError, match=r"^ulysses 64 = 64 ranks, at most 63 in one pool: lower the degrees\.$"
    ):
        cpus(64)


# -- cancel


def test_a_run_cancelled_before_it_is_sent_never_reaches_the_ranks(started):
    pool = started(2)
    with pytest.raises(RunCancelled):
        call(pool, "Load", lambda: True)
    assert handled(pool) == ["Start Release"] * 2


def test_cancel_while_loading_returns_at_once_and_the_next_call_collects_first(started):
    pool = started(2, "*:Load=gated")
    with pytest.raises(RunCancelled, match=r"^The run was cancelled\.$"):
        call(pool, "Load", inside(pool, "loading"))
    assert pool.state == "ready"
    assert all(map(is_alive, pool.ranks.pids))
    replies = call(pool, "Forward", opens(pool))
    assert [(reply.request, reply.output) for reply in replies] == [(2, b"Start Load Forward")] * 2
    assert pool.state == "ready"


def test_the_wait_for_a_cancelled_load_can_be_cancelled_too(started):
    pool = started(2, "*:Load=gated")
    for _ in range(2):
        with pytest.raises(RunCancelled):
            call(pool, "Load", inside(pool, "loading") if pool.idle else iter([False, True]).__next__)
        assert pool.state == "ready"
    gate(pool).fill_(1)
    assert handled(pool) == ["Start Load Release"] * 2


def test_a_cancelled_load_that_fails_later_is_forgotten(started):
    pool = started(2, "*:Load=gated-error")
    with pytest.raises(RunCancelled):
        call(pool, "Load", inside(pool, "loading"))
    assert [reply.output for reply in call(pool, "Release", opens(pool))] == [b"Start Load Release"] * 2


def test_a_rank_that_dies_after_its_load_was_cancelled_is_named_by_the_next_call(started):
    pool = started(2, "*:Load=gated")
    with pytest.raises(RunCancelled):
        call(pool, "Load", inside(pool, "loading"))
    psutil.Process(pool.ranks.pids[1]).kill()
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu was killed .* while loading"):
        call(pool, "Release")


def test_cancel_inside_a_forward_writes_the_board_and_waits_for_every_rank(started):
    pool = started(2, "*:Forward=cancellable")
    call(pool, "Release")
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "computing"))
    assert pool.arena.board.cancelled_request == 2
    assert pool.state == "ready"
    assert pool.idle
    assert handled(pool) == ["Start Release Forward Release"] * 2  # and the stale cancel word stops nothing


def test_a_forward_that_cannot_be_left_in_time_is_collected_by_the_next_call(started, brief):
    pool = started(2, "*:Forward=gated")
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "computing"))
    assert pool.state == "ready"
    replies = call(pool, "Release", opens(pool))
    assert [(reply.request, reply.output) for reply in replies] == [(2, b"Start Forward Release")] * 2


def test_a_forward_that_fails_while_it_is_cancelled_still_names_the_rank(started, brief):
    pool = started(2, "0:Forward=hang", "1:Forward=gated-uneven-error")
    pressed = inside(pool, "computing")
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu failed while computing"):
        call(pool, "Forward", lambda: pressed() and opens(pool)() is False)


def test_cancel_while_starting_ends_every_rank():
    pool = WorkerPool(cpus(2), fake_setup("1:Start=gated"))
    with pytest.raises(RunCancelled):
        pool.start(lambda: pool.arena.board.phase(1) == "importing")
    assert pool.state == "closed"
    assert not any(map(is_alive, pool.ranks.pids))


# -- close


def close_twice(pool: WorkerPool) -> None:
    fd, pids = pool.arena.segment.fd, pool.ranks.pids
    for _ in range(2):
        pool.close()
        assert pool.state == "closed"
    assert not any(map(is_alive, pids))
    assert pool.arena.segment.fd == -1
    assert fd < 0 or not Path(f"/proc/self/fd/{fd}").exists()


def test_a_pool_that_was_never_started_closes():
    close_twice(WorkerPool(cpus(2), fake_setup()))


def test_a_ready_pool_closes(started):
    close_twice(started(2))


def test_a_failed_pool_closes(started):
    pool = started(2, "1:Load=die")
    with pytest.raises(PoolFailed):
        call(pool, "Load")
    close_twice(pool)


def test_a_pool_with_answers_outstanding_closes_without_waiting_for_them(started):
    pool = started(2, "*:Load=gated")
    with pytest.raises(RunCancelled):
        call(pool, "Load", inside(pool, "loading"))
    close_twice(pool)


def test_a_pool_whose_rank_is_gone_closes(started):
    pool = started(2)
    psutil.Process(pool.ranks.pids[0]).kill()
    pool.ranks._crew.exit_of(0, DEADLINE_S)
    close_twice(pool)


def test_a_rank_that_does_not_leave_is_ended_after_the_grace(started):
    pool = started(2, "1:Close=hang")
    pids = pool.ranks.pids
    pool.close(grace_s=0.2)
    assert not any(map(is_alive, pids))


def test_a_closed_pool_takes_no_request(started):
    pool = started(1)
    pool.close()
    with pytest.raises(PoolFailed, match=r"^The pool is closed: run again to start a fresh one\.$"):
        call(pool, "Load")


def test_a_second_threads_call_waits_for_the_first(started):
    pool = started(2, "*:Load=gated")
    answers: dict[str, list[str]] = {}
    second = threading.Thread(target=lambda: answers.update(second=handled(pool)))
    looks = []

    def interrupted() -> bool:
        """Runs inside the first call: starts the second, sees it wait, then opens the gate."""
        if not second.ident and inside(pool, "loading")():
            second.start()
        looks.append(second.ident is not None)
        if sum(looks) == 5:
            assert "second" not in answers
            gate(pool).fill_(1)
        return False

    answers["first"] = [reply.output.decode() for reply in call(pool, "Load", interrupted)]
    second.join(DEADLINE_S)
    assert answers == {"first": ["Start Load"] * 2, "second": ["Start Load Release"] * 2}


def test_a_second_threads_close_waits_for_the_call(started):
    pool = started(2, "*:Load=gated")
    closing = threading.Thread(target=pool.close)

    def interrupted() -> bool:
        if not closing.ident and inside(pool, "loading")():
            closing.start()
            gate(pool).fill_(1)
        return False

    assert len(call(pool, "Load", interrupted)) == 2
    closing.join(DEADLINE_S)
    assert pool.state == "closed"


# -- handles and the keeper


@pytest.fixture
def keeper():
    keeper = PoolKeeper(fake_setup("1:Forward=die"))
    yield keeper
    keeper.close()


def test_a_handle_starts_its_pool_when_it_is_first_needed_and_keeps_it(keeper):
    handle = keeper.handle(cpus(2))
    assert (handle.state, handle.live()) == ("closed", None)
    pool = handle.ensure()
    assert (handle.state, handle.live(), handle.ensure()) == ("ready", pool, pool)
    assert keeper.handle(cpus(2)) is handle


def test_a_handle_starts_a_fresh_pool_after_a_failure(keeper):
    handle = keeper.handle(cpus(2))
    first = handle.ensure()
    with pytest.raises(PoolFailed):
        call(first, "Forward")
    assert (handle.state, handle.live()) == ("failed", None)
    second = handle.ensure()
    assert second is not first
    assert handle.state == "ready"
    assert handled(second) == ["Start Release"] * 2


def test_what_is_left_of_a_pool_that_lost_a_rank_makes_room_too(keeper):
    handle = keeper.handle(cpus(3))
    first = handle.ensure()
    psutil.Process(first.ranks.pids[1]).kill()
    first.ranks._crew.exit_of(1, DEADLINE_S)
    pids = first.ranks.pids
    assert handle.state == "failed", "whoever asks is told, though the others are up"
    keeper.handle(cpus(2)).ensure()
    assert not any(map(is_alive, pids))


def test_a_handle_starts_a_fresh_pool_after_it_was_closed(keeper):
    handle = keeper.handle(cpus(1))
    first = handle.ensure()
    handle.close()
    handle.close()
    assert (handle.state, first.state) == ("closed", "closed")
    assert handle.ensure().state == "ready"


def test_a_handle_whose_pool_cannot_start_tries_again_the_next_time():
    handle = PoolHandle(cpus(1), fake_setup("*:Start=die"))
    for _ in range(2):
        with pytest.raises(PoolFailed, match=r"^Rank 0 on cpu ended with exit status 3"):
            handle.ensure()
        assert handle.live() is None
    handle.close()


def test_a_handle_whose_start_is_cancelled_starts_the_next_time():
    handle = PoolHandle(cpus(1), fake_setup())
    with pytest.raises(RunCancelled):
        handle.ensure(lambda: True)
    assert handle.live() is None
    assert handle.ensure().state == "ready"
    handle.close()


def test_a_pool_that_needs_a_device_closes_the_one_that_holds_it(keeper):
    one, other = keeper.handle(cpus(1)), keeper.handle(cpus(2))
    first = one.ensure()
    pids = first.ranks.pids
    other.ensure()
    assert (first.state, one.state, other.state) == ("closed", "closed", "ready")
    assert not any(map(is_alive, pids))
    one.ensure()
    assert (one.state, other.state) == ("ready", "closed")


def gpus(*indices: int) -> Placement:
    names = ",".join(f"cuda:{index}" for index in indices)
    return place(
        Layout(ulysses=len(indices)),
        names,
        "gloo",
        tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(4)),
    )


def test_pools_on_different_devices_live_side_by_side(keeper):
    handles = [keeper.handle(gpus(0, 1)), keeper.handle(gpus(2))]
    for handle in handles:
        handle.ensure()
    assert [handle.state for handle in keeper.handles()] == ["ready", "ready"]
    keeper.handle(gpus(1, 2)).ensure()
    assert [handle.state for handle in keeper.handles()] == ["closed", "closed", "ready"]


def test_a_keeper_closes_every_pool(keeper):
    pools = [keeper.handle(placement).ensure() for placement in (gpus(0), gpus(1), cpus(1))]
    keeper.close()
    assert [pool.state for pool in pools] == ["closed"] * 3
