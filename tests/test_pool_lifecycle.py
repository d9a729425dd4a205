"""The pool's life, played with fake ranks: every state, every answer a rank can give or withhold, every sentence."""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import pytest
from pipemesh.launcher import pool as pool_module
from pipemesh.launcher.devices import Device, Placement, place
from pipemesh.launcher.pool import STATES, HostSetup, PoolHandle, PoolKeeper, Watch, WorkerPool, rank_environment
from pipemesh.launcher.supervisor import LOG_LINES, Command, Supervisor
from pipemesh.parallel_runtime.errors import LayoutError, ModelError, PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.messages import Forward, Load, Patch, Release
from pipemesh.parallel_runtime.wire.segment import TensorRef

FAKE = str(Path(__file__).with_name("fake_worker.py"))
DEADLINE_S = 60.0  # only ever reached by a test that fails
OUT = TensorRef(4096, (64,), "uint8")
MAKE = {
    "Load": lambda number: Load(request=number, model="m", source=b""),
    "Patch": lambda number: Patch(request=number, model="m", patches_id="p", payload=b""),
    "Release": lambda number: Release(request=number, model="m"),
    "Forward": lambda number: Forward(request=number, model="m", patches_id="", arguments=b"", arena_bytes=0, out=OUT),
}


def fake_setup(*rules: str, stall_s: float = DEADLINE_S) -> HostSetup:
    return HostSetup(comfyui="", stall_s=stall_s, argv=(sys.executable, FAKE, "{fd}", "{parent}", *rules))


def cpus(ranks: int) -> Placement:
    return place(Layout(ulysses=ranks), "cpu", "gloo", ())


@pytest.fixture
def started():
    """``started(ranks, rule, ...)``: a pool of fake ranks that is ready; all are closed after the test."""
    pools = []

    def start(ranks: int, *rules: str, **setup) -> WorkerPool:
        pools.append(WorkerPool(cpus(ranks), fake_setup(*rules, **setup)))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def call(pool: WorkerPool, kind: str, interrupted=lambda: False) -> list:
    return pool.call(MAKE[kind](pool.next_request()), (), interrupted)


def handled(pool: WorkerPool, kind: str = "Release") -> list[str]:
    """What each rank has handled so far, this request included."""
    return [reply.output.decode() for reply in call(pool, kind)]


def inside(pool: WorkerPool, phase: str):
    """An ``interrupted`` that says yes as soon as every rank is in ``phase``."""
    return lambda: all(pool.arena.board.phase(rank) == phase for rank in range(pool.size))


def gate(pool: WorkerPool):
    return pool.arena.segment.tensor(TensorRef(8, (1,), "int64"))


def opens(pool: WorkerPool):
    """An ``interrupted`` that opens the gate and says no."""
    word = gate(pool)
    return lambda: bool(word.fill_(1)) and False


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def failing(ranks: int, *rules: str, kind: str, first: str = "Release", **setup) -> str:
    """The sentence of a pool that fails in a request of this kind; checks that nothing of it is left."""
    pool = WorkerPool(cpus(ranks), fake_setup(*rules, **setup))
    pool.start()
    call(pool, first)
    pids = pool.pids
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


# -- states --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), product(STATES, STATES))
def test_only_the_declared_transitions_are_possible(before, after):
    pool = WorkerPool(cpus(1), fake_setup())
    pool.state = before
    if after in STATES[before]:
        pool._enter(after)
        assert pool.state == after
    else:
        with pytest.raises(AssertionError):
            pool._enter(after)
        assert pool.state == before
    pool.state = "starting"
    pool.close()


@pytest.fixture
def history(monkeypatch):
    """Every state entered, in order."""
    entered = []
    enter = WorkerPool._enter
    monkeypatch.setattr(WorkerPool, "_enter", lambda pool, state: (entered.append(state), enter(pool, state))[1])
    return entered


def test_a_pool_is_starting_then_ready_then_busy_then_ready_then_closed(started, history):
    pool = WorkerPool(cpus(2), fake_setup())
    assert pool.state == "starting"
    assert pool.pids == []
    pool.start()
    assert len(set(pool.pids)) == 2
    assert all(map(is_alive, pool.pids))
    assert [(memory.free, memory.total, memory.model) for memory in pool.memory] == [(3 << 20, 4 << 20, 1 << 20)] * 2
    replies = call(pool, "Load")
    assert [reply.request for reply in replies] == [1, 1]
    pids = pool.pids
    pool.close()
    assert not any(map(is_alive, pids))
    assert history == ["ready", "busy", "ready", "closed"]


def test_a_pool_is_busy_while_it_works(started):
    pool = started(2, "*:Load=slow")
    seen = []
    call(pool, "Load", lambda: seen.append(pool.state))
    assert set(seen[1:]) == {"busy"}
    assert pool.state == "ready"


def test_a_failure_goes_through_failed_to_closed(history):
    failing(2, "1:Load=die", kind="Load")
    assert history == ["ready", "busy", "failed", "closed"]


def test_answers_come_in_rank_order(started):
    pool = started(3, "0:Load=slow")
    assert handled(pool, "Load") == ["Start Load"] * 3
    assert handled(pool, "Forward") == ["Start Load Forward"] * 3


def test_more_ranks_than_the_board_has_lines_for_are_refused_with_the_equation():
    with pytest.raises(LayoutError, match=r"^ulysses 64 = 64 ranks, at most 63 on one host: lower the degrees\.$"):
        WorkerPool(cpus(64), fake_setup())


# -- a rank that cannot go on --------------------------------------------------------------------------------------------


def failing_start(ranks: int, *rules: str, argv: tuple[str, ...] = (), **settings) -> str:
    setup = fake_setup(*rules, **settings)
    pool = WorkerPool(cpus(ranks), replace(setup, argv=argv or setup.argv))
    with pytest.raises(PoolFailed) as caught:
        pool.start()
    assert_over(pool, pool.pids)
    return str(caught.value)


def test_a_rank_that_dies_at_start_is_named_with_its_last_lines():
    lines = "\n".join(f"  line {number}" for number in range(8, 20))
    assert failing_start(2, "1:Start=die") == (
        "Rank 1 on cpu ended with exit status 3 while importing: run again, a fresh pool will be started.\n"
        f"Last lines of rank 1:\n{lines}\n  the last thing I saw"
    )


def test_ranks_that_die_before_they_hear_a_word_show_their_last_lines():
    """Whether the first word still reached the socket or not."""
    sentence = failing_start(2, "*:*=die-unheard")
    assert re.fullmatch(
        r"Rank [01] on cpu ended with exit status 4 while starting: run again, a fresh pool will be started\.\n"
        r"Last lines of rank [01]:\n  no library of that name",
        sentence,
    )


def test_a_worker_that_cannot_be_started_at_all_is_one_sentence():
    assert failing_start(2, argv=("/no/such/python",)) == (
        "The worker processes could not be started ([Errno 2] No such file or directory: '/no/such/python'): "
        "free memory or processes and run again."
    )


def test_a_rank_that_hangs_at_start_is_named():
    assert failing_start(2, "1:Start=hang", stall_s=0.5).startswith("Rank 1 on cpu made no progress for 0.5 s while importing: run again")


@pytest.mark.parametrize(("kind", "phase"), [("Load", "loading"), ("Patch", "patching"), ("Forward", "forward")])
def test_a_rank_that_dies_is_named_with_device_phase_and_last_lines(kind, phase):
    sentence = failing(2, f"1:{kind}=die", "0:Forward=hang", kind=kind)
    assert sentence.startswith(f"Rank 1 on cpu ended with exit status 3 while {phase}: run again, a fresh pool will be started.\nLast lines of rank 1:\n")
    assert sentence.endswith("  line 19\n  the last thing I saw")


def test_a_rank_that_dies_between_requests_is_named_at_the_next(started):
    pool = started(2)
    victim = psutil.Process(pool.pids[1])
    victim.kill()
    victim.wait(DEADLINE_S)
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu was killed \(signal 9; "):
        call(pool, "Load")
    assert pool.state == "failed"


def test_a_rank_that_was_killed_says_what_kills_ranks():
    assert failing(1, "0:Forward=kill", kind="Forward") == (
        "Rank 0 on cpu was killed (signal 9; the system does this when memory runs out) while forward: "
        "run again, a fresh pool will be started.\nLast lines of rank 0:\n  (none)"
    )


def test_a_rank_that_closes_its_connection_but_lives_is_ended():
    assert failing(2, "1:Load=leave", kind="Load").startswith("Rank 1 on cpu closed its connection while loading: run again")


def test_a_rank_whose_child_outlives_it_is_noticed_and_reaped():
    sentence = failing(2, "1:Load=die-with-child", kind="Load")
    assert sentence.startswith("Rank 1 on cpu ended with exit status 3 while loading")
    child = psutil.Process(int(re.search(r"grandchild (\d+)$", sentence).group(1)))
    child.kill()


def test_a_rank_that_speaks_another_schema_is_named_with_the_next_move():
    assert failing(2, "1:Load=garbage", kind="Load").startswith(
        "Rank 1 on cpu sent a message this version of PipeMesh does not know (Invalid value 'Nonsense' - at `$.type`): restart ComfyUI.\n"
    )


def test_a_rank_that_neither_answers_nor_ticks_is_named():
    assert failing(2, "1:Load=hang", kind="Load", stall_s=0.5) == (
        "Rank 1 on cpu made no progress for 0.5 s while loading: run again, a fresh pool will be started "
        "(PIPEMESH_STALL_S sets the limit).\nLast lines of rank 1:\n  (none)"
    )


def test_the_rank_that_is_behind_is_named_where_others_wait_for_it():
    """Rank 0 counts on for a second, then waits as a rank in a collective does; rank 1 has hung from the start."""
    assert failing(3, "*:Forward=tick-then-hang", "1:Forward=hang", kind="Forward", stall_s=0.5).startswith("Rank 1 on cpu made no progress")


def test_a_rank_that_fell_behind_in_an_earlier_request_is_not_blamed_for_it():
    """Rank 0 ticked less in Load; in Forward it is rank 1 that hangs."""
    assert failing(2, "1:Load=slow", "0:Forward=tick-then-hang", "1:Forward=hang", kind="Forward", stall_s=0.5, first="Load").startswith(
        "Rank 1 on cpu made no progress"
    )


def test_a_slow_rank_that_ticks_is_never_judged_stalled(started):
    pool = started(2, "1:Forward=slow", stall_s=0.3)
    assert len(call(pool, "Forward")) == 2
    assert pool.state == "ready"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hangs_are_judged_by_counters_alone():
    clock, counters = Clock(), {0: 0, 1: 0}
    watch = Watch(counters.get, 10.0, clock)
    for _ in range(50):  # one of two ticks every nine seconds: for ever healthy
        clock.now += 9.0
        counters[1] += 1
        assert watch.stalled([0, 1]) is None
    clock.now += 10.0
    assert watch.stalled([0, 1]) is None
    clock.now += 0.1
    assert watch.stalled([0, 1]) == 0
    assert watch.stalled([1]) is None  # rank 0 has answered: another question, a new start
    clock.now += 10.1
    assert watch.stalled([1]) == 1
    assert watch.stalled([]) is None


# -- a request that is rejected ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Load", "Forward"])
def test_a_request_that_every_rank_refuses_keeps_the_pool_ready(started, kind):
    pool = started(2, f"*:{kind}=refuse")
    with pytest.raises(Refused, match=r"^This cannot be done: do something else\.$"):
        call(pool, kind)
    assert pool.state == "ready"
    assert handled(pool) == [f"Start {kind} Release"] * 2


@pytest.mark.parametrize(("kind", "phase"), [("Load", "loading"), ("Forward", "forward")])
def test_an_error_in_every_rank_keeps_the_pool_ready(started, kind, phase):
    pool = started(2, f"*:{kind}=error")
    with pytest.raises(ModelError, match=f"^Rank 0 on cpu failed while {phase}: RuntimeError: shapes do not match$"):
        call(pool, kind)
    assert pool.state == "ready"
    assert handled(pool) == [f"Start {kind} Release"] * 2


MEMORY_SENTENCE = (
    "Rank {rank} on cpu ran out of memory while forward (3.0 MiB of 4.0 MiB free, 1.0 MiB held by models; {cause}): "
    "use more ranks, a smaller image or batch, or free memory."
)


@pytest.mark.parametrize(
    ("deed", "cause"), [("memory", "can't allocate memory: you tried to allocate 7 bytes."), ("memory-silent", "no details")]
)
def test_every_rank_out_of_memory_keeps_the_pool_ready(started, deed, cause):
    pool = started(2, f"*:Forward={deed}")
    with pytest.raises(ModelError) as caught:
        call(pool, "Forward")
    assert str(caught.value) == MEMORY_SENTENCE.format(rank=0, cause=cause)
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 2


@pytest.fixture
def brief(monkeypatch):
    """The waits for other ranks are short: these ranks will not answer."""
    monkeypatch.setattr(pool_module, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(pool_module, "CANCEL_WAIT_S", 0.2)


def test_one_rank_that_fails_in_lockstep_takes_the_pool_with_it(brief):
    assert failing(3, "*:Forward=hang", "1:Forward=error", kind="Forward") == (
        "Rank 1 on cpu failed while forward: RuntimeError: shapes do not match Run again, a fresh pool will be started.\n"
        "Last lines of rank 1:\n  (none)"
    )


def test_one_rank_out_of_memory_in_lockstep_takes_the_pool_with_it(brief):
    sentence = failing(2, "0:Forward=hang", "1:Forward=memory", kind="Forward")
    cause = "can't allocate memory: you tried to allocate 7 bytes."
    assert sentence.split("\n")[0] == f"{MEMORY_SENTENCE.format(rank=1, cause=cause)} Run again, a fresh pool will be started."


def test_memory_is_named_before_the_errors_it_causes_in_other_ranks(brief):
    assert failing(3, "*:Forward=error", "1:Forward=hang", "2:Forward=memory", kind="Forward").startswith("Rank 2 on cpu ran out of memory")


def test_a_rank_that_dies_is_named_before_the_errors_it_causes_in_other_ranks():
    """Rank 0's error (its peer is gone) is there first; rank 1's end is noticed while the others are waited for."""
    assert failing(2, "0:Forward=error", "1:Forward=slow-then-die", kind="Forward").startswith("Rank 1 on cpu ended with exit status 3")


def test_ranks_that_disagree_about_a_request_are_not_used_again():
    assert failing(2, "1:Load=error", kind="Load").startswith("Rank 1 on cpu failed while loading: RuntimeError: shapes do not match")


# -- cancel --------------------------------------------------------------------------------------------------------------


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
    assert all(map(is_alive, pool.pids))
    replies = call(pool, "Forward", opens(pool))
    assert [(reply.request, reply.output) for reply in replies] == [(2, b"Start Load Forward")] * 2
    assert pool.state == "ready"


def test_the_wait_for_a_cancelled_load_can_be_cancelled_too(started):
    pool = started(2, "*:Load=gated")
    for _ in range(2):
        with pytest.raises(RunCancelled):
            call(pool, "Load", inside(pool, "loading") if not pool._outstanding else iter([False, True]).__next__)
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
    psutil.Process(pool.pids[1]).kill()
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu was killed .* while loading"):
        call(pool, "Release")


def test_cancel_inside_a_forward_writes_the_board_and_waits_for_every_rank(started):
    pool = started(2, "*:Forward=cancellable")
    call(pool, "Release")
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "forward"))
    assert pool.arena.board.cancelled_request == 2
    assert pool.state == "ready"
    assert not pool._outstanding
    assert handled(pool) == ["Start Release Forward Release"] * 2  # and the stale cancel word stops nothing


def test_a_forward_that_cannot_be_left_in_time_is_collected_by_the_next_call(started, brief):
    pool = started(2, "*:Forward=gated")
    with pytest.raises(RunCancelled):
        call(pool, "Forward", inside(pool, "forward"))
    assert pool.state == "ready"
    replies = call(pool, "Release", opens(pool))
    assert [(reply.request, reply.output) for reply in replies] == [(2, b"Start Forward Release")] * 2


def test_a_forward_that_fails_while_it_is_cancelled_still_names_the_rank(started, brief):
    pool = started(2, "0:Forward=hang", "1:Forward=gated-error")
    pressed = inside(pool, "forward")
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu failed while forward"):
        call(pool, "Forward", lambda: pressed() and opens(pool)() is False)


def test_cancel_while_starting_ends_every_rank():
    pool = WorkerPool(cpus(2), fake_setup("1:Start=gated"))
    with pytest.raises(RunCancelled):
        pool.start(lambda: pool.arena.board.phase(1) == "importing")
    assert pool.state == "closed"
    assert not any(map(is_alive, pool.pids))


# -- close ---------------------------------------------------------------------------------------------------------------


def close_twice(pool: WorkerPool) -> None:
    fd, pids = pool.arena.segment.fd, pool.pids
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
    psutil.Process(pool.pids[0]).kill()
    psutil.wait_procs([psutil.Process(pool.pids[0])], DEADLINE_S)
    close_twice(pool)


def test_a_rank_that_does_not_leave_is_ended_after_the_grace(started):
    pool = started(2, "1:Close=hang")
    pids = pool.pids
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


# -- handles and the keeper ----------------------------------------------------------------------------------------------


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
        with pytest.raises(PoolFailed, match="^Rank 0 on cpu ended with exit status 3"):
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
    pids = first.pids
    other.ensure()
    assert (first.state, one.state, other.state) == ("closed", "closed", "ready")
    assert not any(map(is_alive, pids))
    one.ensure()
    assert (one.state, other.state) == ("ready", "closed")


def gpus(*indices: int) -> Placement:
    names = ",".join(f"cuda:{index}" for index in indices)
    return place(Layout(ulysses=len(indices)), names, "gloo", tuple(Device(f"cuda:{index}", f"GPU-{index}") for index in range(4)))


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


# -- processes -----------------------------------------------------------------------------------------------------------


def test_a_rank_sees_its_own_gpu_by_uuid_and_nothing_that_breaks_it(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "RANK", "MASTER_PORT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HOME_OF_THE_USER", "kept")
    pool = WorkerPool(gpus(3, 1), fake_setup())
    pool.start()
    for pid, uuid in zip(pool.pids, ("GPU-3", "GPU-1"), strict=True):
        environ = psutil.Process(pid).environ()
        assert environ["CUDA_VISIBLE_DEVICES"] == uuid
        assert environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert environ["HOME_OF_THE_USER"] == "kept"
        assert not {"PYTORCH_CUDA_ALLOC_CONF", "RANK", "MASTER_PORT", "PYTHONPATH"} & environ.keys()
    pool.close()


def test_nccl_is_left_to_choose_its_own_interface():
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(Device("cuda:0", "GPU-0"), "nccl", {"PATH": "/bin"})
    assert rank_environment(Device("cpu"), "gloo", {"PATH": "/bin"}) == {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "lo"}


def run_supervised(*scripts: str) -> Supervisor:
    supervisor = Supervisor([Command((sys.executable, "-c", script, "{fd}", "{parent}"), dict(os.environ), 0) for script in scripts])
    supervisor.start()
    return supervisor


def test_the_last_lines_of_a_rank_are_kept():
    supervisor = run_supervised("for n in range(100): print('line', n)\nprint('no newline', end='')", "print('caf\\xe9')")
    assert [supervisor.exit_of(rank, DEADLINE_S) for rank in (0, 1)] == [0, 0]
    assert supervisor.tail(0) == [*(f"line {number}" for number in range(100 - LOG_LINES, 100)), "no newline"]
    assert supervisor.tail(1) == ["café"]
    supervisor.stop(0)


def test_a_progress_bar_is_one_line_not_all_its_states():
    supervisor = run_supervised("for n in range(100): print(f'\\r{n}%', end='')\nprint('\\rdone')")
    assert supervisor.exit_of(0, DEADLINE_S) == 0
    assert supervisor.tail(0)[-1] == "done"
    assert all(len(line) < 10 for line in supervisor.tail(0))
    supervisor.stop(0)


def test_braces_in_a_path_are_left_alone():
    script = "import sys; print(sys.argv[1:])"
    supervisor = Supervisor([Command((sys.executable, "-c", script, "{fd}", "/home/{me}/{}", "{parent}"), dict(os.environ), 0)])
    supervisor.start()
    assert supervisor.exit_of(0, DEADLINE_S) == 0
    assert supervisor.tail(0) == [str(["0", "/home/{me}/{}", str(os.getpid())])]
    supervisor.stop(0)


def test_where_one_rank_cannot_be_started_the_others_are_ended():
    bad = Command(("/no/such/program",), {}, 0)
    good = Command((sys.executable, "-c", "import time; time.sleep(60)"), dict(os.environ), 0)
    supervisor = Supervisor([good, bad])
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    supervisor.stop(0)
    assert len(supervisor.pids) == 1
    assert not is_alive(supervisor.pids[0])
