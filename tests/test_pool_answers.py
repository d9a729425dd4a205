"""Every answer a rank can give or withhold, and the sentence for it; played with fake ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace

import psutil
import pytest
from pipemesh.launcher.pool import verdict
from pipemesh.launcher.pool.crew import KEEP_MEMORY, rank_environment
from pipemesh.launcher.pool.devices import Device, place
from pipemesh.launcher.pool.pool import WorkerPool
from pipemesh.launcher.pool.supervisor import LOG_LINES, Command, Supervisor
from pipemesh.launcher.pool.watch import Watch
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed, Refused
from pipemesh.parallel_runtime.layout import Layout

from .fake_pools import (
    DEADLINE_S,
    assert_over,
    call,
    cpus,
    failing,
    fake_setup,
    handled,
    is_alive,
    submitted,
    through,
)
from .fake_worker import LESS_MEMORY


@pytest.fixture
def brief(monkeypatch):
    """The wait for the other ranks is short: these ranks will not answer."""
    monkeypatch.setattr(verdict, "OTHERS_WAIT_S", 0.2)


# -- a request that is abandoned while ranks compute


def test_ranks_leave_a_request_that_is_abandoned_and_take_the_next(started):
    pool = started(2, "*:Forward=cancellable")
    submitted(pool)
    assert pool.state == "busy"
    pool.abandon()
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 2


def test_answers_that_came_before_their_request_was_abandoned_are_not_believed(started):
    pool = started(2)
    submitted(pool)
    pool.abandon()
    assert pool.idle and len(through(pool)) == 2


# -- a request for some of the ranks


@pytest.mark.parametrize("kind", ["Forward", "Fetch", "EndRun"])
def test_ranks_that_are_not_asked_neither_hear_of_it_nor_lose_what_they_told_of_their_memory(started, kind):
    pool = started(3, f"*:{kind}=fill-up")
    free = [memory.free for memory in pool.memory]
    number = submitted(pool, kind, group=(1,))
    assert list(pool.collect(number)) == [1]
    assert [memory.free for memory in pool.memory] == [free[0], LESS_MEMORY[0], free[2]]
    assert handled(pool) == ["Start Release", f"Start {kind} Release", "Start Release"]


# -- a rank that cannot go on


def failing_start(ranks: int, *rules: str, argv: tuple[str, ...] = (), **settings) -> str:
    setup = fake_setup(*rules, **settings)
    pool = WorkerPool(cpus(ranks), replace(setup, argv=argv or setup.argv))
    with pytest.raises(PoolFailed) as caught:
        pool.start()
    assert_over(pool, pool.ranks.pids)
    return str(caught.value)


def test_a_rank_that_dies_at_start_is_named_with_its_last_lines():
    lines = "\n".join(f"  line {number}" for number in range(8, 20))
    assert (
        failing_start(2, "1:Start=die")
        == "Rank 1 on cpu ended with exit status 3 while importing: run again, a fresh pool will be"
        " started.\n"
        f"Last lines of rank 1:\n{lines}\n  the last thing I saw"
    )


def test_ranks_that_die_before_they_hear_a_word_show_their_last_lines():
    """Whether the first word still reached the socket or not."""
    sentence = failing_start(2, "*:*=die-unheard")
    assert re.fullmatch(
        r"Rank [01] on cpu ended with exit status 4 while starting: run again, a fresh pool will be"
        r" started\.\n"
        r"Last lines of rank [01]:\n  no library of that name",
        sentence,
    )


def test_a_worker_that_cannot_be_started_at_all_is_one_sentence():
    assert (
        failing_start(2, argv=("/no/such/python",))
        == "The worker processes could not be started ([Errno 2] No such file or directory:"
        " '/no/such/python'): "
        "free memory or processes and run again."
    )


def test_a_rank_that_hangs_at_start_is_named():
    assert failing_start(2, "1:Start=hang", stall_s=2.5).startswith(
        "Rank 1 on cpu made no progress for 2.5 s while importing: run again"
    )


@pytest.mark.parametrize(
    ("kind", "phase"), [("Load", "loading"), ("SetWeightPatches", "patching"), ("Forward", "computing")]
)
def test_a_rank_that_dies_is_named_with_device_phase_and_last_lines(kind, phase):
    sentence = failing(2, f"1:{kind}=die", "0:Forward=hang", kind=kind)
    first, second, *lines = sentence.split("\n")
    assert (
        first
        == f"Rank 1 on cpu ended with exit status 3 while {phase}: run again, a fresh pool will be started."
    )
    assert second == "Last lines of rank 1:"
    assert lines == [*(f"  line {number}" for number in range(8, 20)), "  the last thing I saw"]


def test_a_rank_that_dies_between_requests_is_named_at_the_next(started):
    pool = started(2)
    psutil.Process(pool.ranks.pids[1]).kill()
    pool.ranks._crew.exit_of(1, DEADLINE_S)
    with pytest.raises(PoolFailed, match=r"^Rank 1 on cpu was killed \(signal 9; "):
        call(pool, "Load")
    assert pool.state == "failed"


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "was killed (signal 9; the system does this when memory runs out)"),
        (
            signal.SIGBUS,
            "was killed (signal 7; its checkpoint was cut short on disk, or shared memory ran out)",
        ),
        (signal.SIGSEGV, "ended with signal 11"),
    ],
)
def test_a_rank_that_was_killed_says_what_kills_ranks(number, cause):
    assert (
        failing(1, f"0:Forward=kill-{number:d}", kind="Forward")
        == f"Rank 0 on cpu {cause} while computing: run again, a fresh pool will be started."
    )


def test_a_rank_that_closes_its_connection_but_lives_is_ended():
    assert failing(2, "1:Load=leave", kind="Load").startswith(
        "Rank 1 on cpu closed its connection while loading: run again"
    )


def test_a_rank_whose_child_outlives_it_is_noticed_and_reaped():
    sentence = failing(2, "1:Load=die-with-child", kind="Load")
    assert sentence.startswith("Rank 1 on cpu ended with exit status 3 while loading")
    child = psutil.Process(int(re.search(r"grandchild (\d+)$", sentence).group(1)))
    child.kill()


def test_a_rank_that_speaks_another_schema_is_named_with_the_next_move():
    assert failing(2, "1:Load=garbage", kind="Load").startswith(
        "Rank 1 on cpu sent a message this version of PipeMesh does not know (Invalid value 'Nonsense' - at"
        " `$.type`): restart ComfyUI."
    )


def test_a_rank_that_neither_answers_nor_ticks_is_named():
    assert (
        failing(2, "1:Load=hang", kind="Load", stall_s=0.5)
        == "Rank 1 on cpu made no progress for 0.5 s while loading: run again, a fresh pool will be started"
        " (PIPEMESH_STALL_S sets the limit)."
    )


def test_the_rank_that_is_behind_is_named_where_others_wait_for_it():
    """Rank 0 counts on for a second, then waits as a rank in a collective does; rank 1 has hung
    from the start.
    """
    sentence = failing(3, "*:Forward=tick-then-hang", "1:Forward=hang", kind="Forward", stall_s=0.5)
    assert sentence.startswith("Rank 1 on cpu made no progress")


def test_a_rank_that_fell_behind_in_an_earlier_request_is_not_blamed_for_it():
    """Rank 0 ticked less in Load; in Forward it is rank 1 that hangs."""
    rules = "1:Load=slow", "0:Forward=tick-then-hang", "1:Forward=hang"
    assert failing(2, *rules, kind="Forward", stall_s=0.5, first="Load").startswith(
        "Rank 1 on cpu made no progress"
    )


def test_a_slow_rank_that_ticks_is_never_judged_stalled(started):
    pool = started(2, "1:Forward=slow")
    pool._conversation.stall_s = 0.6
    assert len(call(pool, "Forward")) == 2
    assert pool.state == "ready"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hangs_are_judged_by_counters_alone():
    clock, counters = Clock(), {0: 0, 1: 0}
    watch = Watch(counters.get, clock)
    for _ in range(50):  # one of two ticks every nine seconds: for ever healthy
        clock.now += 9.0
        counters[1] += 1
        assert watch.stalled_rank([0, 1], 10.0) is None
    clock.now += 10.0
    assert watch.stalled_rank([0, 1], 10.0) is None
    clock.now += 0.1
    assert watch.stalled_rank([0, 1], 10.0) == 0
    assert watch.stalled_rank([1], 10.0) is None  # rank 0 has answered: another question, a new start
    clock.now += 10.1
    assert watch.stalled_rank([1], 10.0) == 1
    assert watch.stalled_rank([], 10.0) is None


# -- a request that is rejected


@pytest.mark.parametrize("kind", ["Load", "Forward"])
def test_a_request_that_every_rank_refuses_keeps_the_pool_ready(started, kind):
    pool = started(2, f"*:{kind}=refuse")
    with pytest.raises(Refused, match=r"^This cannot be done: do something else\.$"):
        call(pool, kind)
    assert pool.state == "ready"
    assert handled(pool) == [f"Start {kind} Release"] * 2


@pytest.mark.parametrize(("kind", "phase"), [("Load", "loading"), ("Forward", "computing")])
def test_an_error_in_every_rank_keeps_the_pool_ready(started, kind, phase):
    pool = started(2, f"*:{kind}=error")
    with pytest.raises(
        ModelError,
        match=(
            rf"^Rank 0 on cpu failed while {phase}: RuntimeError: shapes do not match\. Check what is"
            r" connected"
        ),
    ):
        call(pool, kind)
    assert pool.state == "ready"
    assert handled(pool) == [f"Start {kind} Release"] * 2


MEMORY_SENTENCE = (
    "Rank {rank} on cpu ran out of memory while computing (3.0 MiB of 4.0 MiB free, 1.0 MiB held by models;"
    " {cause}): use more ranks, a smaller image or batch, or free memory."
)


@pytest.mark.parametrize(
    ("deed", "cause"),
    [("memory", "can't allocate memory: you tried to allocate 7 bytes."), ("memory-silent", "no details")],
)
def test_every_rank_out_of_memory_keeps_the_pool_ready(started, deed, cause):
    pool = started(2, f"*:Forward={deed}")
    with pytest.raises(OutOfMemory) as caught:
        call(pool, "Forward")
    assert str(caught.value) == MEMORY_SENTENCE.format(rank=0, cause=cause)
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 2


def test_one_rank_that_leaves_others_waiting_takes_the_pool_with_it(brief):
    assert (
        failing(3, "*:Forward=hang", "1:Forward=uneven-error", kind="Forward")
        == "Rank 1 on cpu failed while computing: RuntimeError: shapes do not match. Run again, a fresh pool"
        " will be started."
    )


def test_a_stage_that_fails_lets_the_others_leave_and_the_pool_stays_ready(started):
    """They may have many seconds of work before them, with what the failed one sent in place of its
    hidden rows.
    """
    stages = place(Layout(pipefusion=3), "cpu", "gloo", ())
    pool = started(stages, "0:Forward=error", "1:Forward=cancellable", "2:Forward=cancellable")
    with pytest.raises(ModelError, match=r"^Rank 0 on cpu failed while computing"):
        through(pool)
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 3


def test_one_rank_that_fails_in_step_keeps_the_pool(started):
    pool = started(3, "*:Forward=cancellable", "1:Forward=memory")
    gone = submitted(pool)
    pool.call_back()
    with pytest.raises(OutOfMemory, match=r"^Rank 1 on cpu ran out of memory while computing"):
        pool.collect(gone)
    assert pool.state == "ready"
    assert handled(pool) == ["Start Forward Release"] * 3


def test_a_model_that_does_not_fit_one_rank_keeps_the_pool_under_nccl_too(started):
    pool = started(replace(cpus(2), backend="nccl"), "0:Load=memory")
    with pytest.raises(OutOfMemory):
        call(pool, "Load")
    assert pool.state == "ready"


def test_one_rank_out_of_memory_that_leaves_others_waiting_takes_the_pool_with_it(brief):
    sentence = failing(2, "0:Forward=hang", "1:Forward=uneven-memory", kind="Forward")
    cause = "can't allocate memory: you tried to allocate 7 bytes."
    assert (
        sentence.split("\n")[0]
        == f"{MEMORY_SENTENCE.format(rank=1, cause=cause)} Run again, a fresh pool will be started."
    )


def test_memory_is_named_before_the_errors_it_causes_in_other_ranks(brief):
    assert failing(
        3, "*:Forward=uneven-error", "1:Forward=hang", "2:Forward=uneven-memory", kind="Forward"
    ).startswith("Rank 2 on cpu ran out of memory")


def test_a_rank_that_dies_is_named_before_the_errors_it_causes_in_other_ranks():
    """Rank 0's error (its peer is gone) is there first; rank 1's end is noticed while the others
    are waited for.
    """
    assert failing(2, "0:Forward=uneven-error", "1:Forward=slow-then-die", kind="Forward").startswith(
        "Rank 1 on cpu ended with exit status 3"
    )


def test_ranks_may_disagree_about_what_they_do_alone(started):
    pool = started(2, "1:Load=error")
    with pytest.raises(
        ModelError,
        match=(
            r"^Rank 1 on cpu failed while loading: RuntimeError: shapes do not match\. Check what is"
            r" connected"
        ),
    ):
        call(pool, "Load")
    assert pool.state == "ready"
    assert handled(pool) == ["Start Load Release"] * 2


def test_ranks_that_disagree_about_a_forward_are_not_used_again():
    sentence = failing(2, "1:Forward=uneven-error", kind="Forward")
    assert sentence.startswith(
        "Rank 1 on cpu failed while computing: RuntimeError: shapes do not match. Run again"
    )


# -- processes


def test_a_rank_sees_its_own_gpu_by_uuid_and_nothing_that_breaks_it(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HOME_OF_THE_USER", "kept")
    devices = (Device("cuda:0", "GPU-3"), Device("cuda:1", "GPU-1"))
    pool = WorkerPool(place(Layout(ulysses=2), "auto", "gloo", devices), fake_setup())
    pool.start()
    for pid, uuid in zip(pool.ranks.pids, ("GPU-3", "GPU-1"), strict=True):
        environ = psutil.Process(pid).environ()
        assert environ["CUDA_VISIBLE_DEVICES"] == uuid
        assert environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert environ["HOME_OF_THE_USER"] == "kept"
        assert not {"PYTORCH_CUDA_ALLOC_CONF", "RANK", "MASTER_PORT"} & environ.keys()
    pool.close()


def test_a_cpu_rank_keeps_its_memory_between_layers_and_a_gpu_rank_is_left_alone():
    assert "MALLOC_TRIM_THRESHOLD_" in rank_environment(Device("cpu"), "gloo", {})
    assert "MALLOC_TRIM_THRESHOLD_" not in rank_environment(Device("cuda:0", "GPU-1"), "nccl", {})


def test_between_hosts_gloo_and_nccl_take_the_interface_between_them_and_nccl_the_users():
    away = rank_environment(Device("cuda:0", "GPU-0"), "nccl", {}, "eth7")
    assert (away["GLOO_SOCKET_IFNAME"], away["NCCL_SOCKET_IFNAME"]) == ("eth7", "eth7")
    assert (
        rank_environment(Device("cuda:0", "GPU-0"), "nccl", {"NCCL_SOCKET_IFNAME": "ib0"}, "eth7")[
            "NCCL_SOCKET_IFNAME"
        ]
        == "ib0"
    )


def test_on_one_host_ranks_listen_on_loopback_alone_whatever_the_user_has_set():
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for backend in ("nccl", "gloo"):
        gpu = rank_environment(
            Device("cuda:0", "GPU-0"), backend, {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth0"}
        )
        assert gpu == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-0", **loopback}
    cpu = rank_environment(Device("cpu"), "gloo", {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"})
    assert cpu == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", **loopback, **KEEP_MEMORY}


def run_supervised(*scripts: str) -> Supervisor:
    supervisor = Supervisor(
        [
            Command((sys.executable, "-c", script, "{fd}", "{parent}"), dict(os.environ), 0)
            for script in scripts
        ]
    )
    supervisor.start()
    return supervisor


def test_the_last_lines_of_a_rank_are_kept():
    supervisor = run_supervised(
        "for n in range(100): print('line', n)\nprint('no newline', end='')", "print('caf\\xe9')"
    )
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
    supervisor = Supervisor(
        [Command((sys.executable, "-c", script, "{fd}", "/home/{me}/{}", "{parent}"), dict(os.environ), 0)]
    )
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
