"""The pool's life, played with fake ranks: its states, cancel, close, handles and the keeper."""

from __future__ import annotations

import threading
from dataclasses import replace

import psutil
import pytest
from pipemesh.parallel_runtime.errors import PoolFailed, PoolSpent, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool import conversation, verdict
from pipemesh.pool.devices import Device, Placement, place
from pipemesh.pool.handle import PoolHandle, PoolKeeper
from pipemesh.pool.pool import WorkerPool

from ..kit.fake_pools import (
    DEADLINE_S,
    assert_over,
    call,
    cpus,
    fake_setup,
    gate,
    handled,
    inside,
    is_alive,
    opens,
    submitted,
)
from ..kit.holdings import NOTHING, Holdings


@pytest.fixture
def brief(monkeypatch):
    """The waits for other ranks are short: these ranks will not answer."""
    monkeypatch.setattr(verdict, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(conversation, "CANCEL_WAIT_S", 0.2)


# -- states


def test_a_pool_is_starting_then_ready_then_closed():
    pool = WorkerPool(cpus(2), fake_setup())
    assert (pool.state, pool.ranks.pids) == ("starting", [])
    pool.start()
    pids = pool.ranks.pids
    assert pool.state == "ready" and len(set(pids)) == 2 and all(map(is_alive, pids))
    assert [(one.free, one.total, one.model) for one in pool.memory] == [(3 << 20, 4 << 20, 1 << 20)] * 2
    assert [reply.request for reply in call(pool, "Load")] == [1, 1]
    pool.close()
    assert pool.state == "closed" and not any(map(is_alive, pids))


def test_a_pool_is_busy_while_it_works(started):
    pool = started(2, "*:Load=slow")
    seen = []
    call(pool, "Load", lambda: seen.append(pool.state))
    assert set(seen[1:]) == {"busy"}
    assert pool.state == "ready"


def test_a_request_goes_to_its_group_alone_and_groups_work_side_by_side(started):
    pool = started(3, "2:Forward=gated")
    slow, quick = submitted(pool, group=(2,)), submitted(pool, group=(0, 1))
    assert sorted(pool.collect(quick)) == [0, 1], "the other group is still at its own"
    gate(pool).fill_(1)
    assert sorted(pool.collect(slow)) == [2]
    assert handled(pool) == ["Start Forward Release"] * 3


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


def test_a_forward_that_fails_while_it_is_cancelled_still_names_the_rank(started, brief):
    pool = started(2, "0:Forward=hang", "1:Forward=gated-uneven-error")
    pressed = inside(pool, "computing")
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu failed while computing"):
        call(pool, "Forward", lambda: pressed() and opens(pool)() is False)


# -- close


def test_a_rank_that_does_not_leave_is_ended_after_the_grace(started):
    pool = started(2, "1:Close=hang")
    pool.close(grace_s=1.5)
    assert [pool.ranks._crew.supervisor.exit_of(rank, 0) for rank in (0, 1)] == [0, -9]


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
    psutil.Process(first.ranks.pids[1]).kill()
    first.ranks._crew.supervisor.exit_of(1, DEADLINE_S)
    pids = first.ranks.pids
    assert handle.state == "failed", "whoever asks is told, though the others are up"
    keeper.handle(cpus(2)).ensure()
    assert not any(map(is_alive, pids))


def test_a_handle_whose_pool_cannot_start_tries_again_the_next_time():
    handle = PoolHandle(cpus(1), fake_setup("*:Start=die"))
    for _ in range(2):
        with pytest.raises(PoolFailed, match=r"^Rank 0 on cpu ended with exit status 3"):
            handle.ensure()
        assert handle.live() is None
    handle.close()


def gpus(*indices: int) -> Placement:
    names = ",".join(f"cuda:{index}" for index in indices)
    return place(
        Layout(ulysses=len(indices)),
        names,
        "gloo",
        tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(4)),
    )


def test_pools_live_side_by_side_on_different_devices_and_one_makes_room_for_another_on_its_own(keeper):
    handles = [keeper.handle(gpus(0, 1)), keeper.handle(gpus(2))]
    for handle in handles:
        handle.ensure()
    assert [handle.state for handle in keeper.handles()] == ["ready", "ready"]
    keeper.handle(gpus(1, 2)).ensure()
    assert [handle.state for handle in keeper.handles()] == ["closed", "closed", "ready"]
    handles[0].ensure()
    assert [handle.state for handle in keeper.handles()] == ["ready", "closed", "closed"]
    keeper.close()
    assert handles[0].state == "closed"


@pytest.mark.parametrize("collected", [0, 1])
def test_a_rank_that_dies_ends_the_pool_whichever_group_is_awaited(started, collected):
    pool = started(4)
    pids = pool.ranks.pids
    numbers = [submitted(pool, group=(0, 1), rules="*:Forward=gated")]
    numbers += [submitted(pool, group=(2, 3), rules="2:Forward=gated 3:Forward=slow-then-die")]
    with pytest.raises(PoolFailed, match=r"^Rank 3 on cpu .*computing"):
        pool.collect(numbers[collected])
    assert_over(pool, pids)
