"""Every answer a rank can give or withhold, and the sentence for it; played with fake ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import psutil
import pytest
from pipemesh.parallel_runtime.errors import ModelError, OutOfMemory, PoolFailed, Refused
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool import crew, supervisor
from pipemesh.pool.conversation import StallClock
from pipemesh.pool.crew import KEEP_MEMORY, rank_environment
from pipemesh.pool.devices import HIP_VARIABLE, Device, place
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.supervisor import LOG_LINES, Command, Supervisor

from ..kit.fake_pools import (
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
from ..kit.fake_worker import LESS_MEMORY

# -- a request for some of the ranks


def test_ranks_that_are_not_asked_neither_hear_of_it_nor_lose_what_they_told_of_their_memory(started):
    pool = started(3, "*:Forward=fill-up")
    free = [memory.free for memory in pool.memory]
    number = submitted(pool, group=(1,))
    assert list(pool.collect(number)) == [1]
    assert [memory.free for memory in pool.memory] == [free[0], LESS_MEMORY[0], free[2]]
    assert handled(pool) == ["Start Release", "Start Forward Release", "Start Release"]


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


@pytest.mark.parametrize(("kind", "phase"), [("SetWeightPatches", "patching"), ("Forward", "computing")])
def test_a_rank_that_dies_while_another_waits_for_it_is_named_with_device_and_phase(kind, phase):
    assert failing(2, f"1:{kind}=die", "0:Forward=hang", kind=kind).startswith(
        f"Rank 1 on cpu ended with exit status 3 while {phase}: run again"
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hangs_are_judged_by_counters_alone():
    clock, counters = Clock(), {0: 0, 1: 0}
    watch = StallClock(counters.get, clock)
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
    watch.since = clock.now - 10.0
    assert watch.stalled_rank([1], 10.0) is None, "asked for again, or stopped"
    assert watch.stalled_rank([], 10.0) is None


# -- a request that is rejected


FAILED = (
    "Rank 0 on cpu failed while computing: RuntimeError: shapes do not match. Check what is connected to this"
    " node; the workers are ready for the next run."
)
FULL = (
    "Rank 0 on cpu ran out of memory while computing (3.0 MiB of 4.0 MiB free, 1.0 MiB held by models;"
    " {}): use more ranks, a smaller image or batch, or free memory."
)


@pytest.mark.parametrize(
    ("kind", "deed", "error", "sentence"),
    [
        ("Load", "refuse", Refused, "This cannot be done: do something else."),
        ("Forward", "error", ModelError, FAILED),
        (
            "Forward",
            "memory",
            OutOfMemory,
            FULL.format("can't allocate memory: you tried to allocate 7 bytes."),
        ),
        ("Forward", "memory-silent", OutOfMemory, FULL.format("no details")),
    ],
)
def test_what_every_rank_rejects_is_one_sentence_and_the_pool_stays_ready(
    started, kind, deed, error, sentence
):
    pool = started(2, f"*:{kind}={deed}")
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call(pool, kind)
    assert handled(pool) == [f"Start {kind} Release"] * 2


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


def test_a_rank_that_dies_is_named_before_the_errors_it_causes_in_other_ranks():
    """Rank 0's error (its peer is gone) is there first; rank 1's end is noticed while the others
    are waited for.
    """
    assert failing(2, "0:Forward=uneven-error", "1:Forward=slow-then-die", kind="Forward").startswith(
        "Rank 1 on cpu ended with exit status 3"
    )


# -- processes


def test_between_hosts_gloo_and_nccl_take_the_interface_between_them_and_nccl_the_users():
    away = rank_environment(Device("cuda:0", "GPU-0"), "nccl", {}, "eth7")
    assert (away["GLOO_SOCKET_IFNAME"], away["NCCL_SOCKET_IFNAME"]) == ("eth7", "eth7")
    assert (
        rank_environment(Device("cuda:0", "GPU-0"), "nccl", {"NCCL_SOCKET_IFNAME": "ib0"}, "eth7")[
            "NCCL_SOCKET_IFNAME"
        ]
        == "ib0"
    )


def test_on_one_host_ranks_see_their_own_gpu_listen_on_loopback_alone_and_have_nothing_that_breaks_them():
    breaks = dict.fromkeys(("RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"), "0")
    breaks["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"  # ComfyUI's own choice
    of_gpus = {
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for backend in ("nccl", "gloo"):
        gpu = rank_environment(
            Device("cuda:0", "GPU-0"), backend, {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth0", **breaks}
        )
        assert gpu == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-0", **loopback, **of_gpus}
    cpu = rank_environment(Device("cpu"), "gloo", {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"})
    assert cpu == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", **loopback, **KEEP_MEMORY}


@pytest.mark.parametrize(
    ("allocator", "left"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,backend:cudaMallocAsync"},
            "max_split_size_mb:512",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
    ids=["joined to ComfyUI's", "of another name"],
)
def test_what_the_user_has_set_for_gpus_stays(allocator, left):
    own = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "TORCH_NCCL_ENABLE_MONITORING": "1"}
    env = rank_environment(Device("cuda:0", "GPU-0"), "nccl", {**own, **allocator})
    assert {name: env[name] for name in own} == own
    assert {name: value for name, value in env.items() if "ALLOC_CONF" in name} == {
        next(iter(allocator)): left
    }


def test_amds_gpus_and_those_of_wsl_get_no_segments_that_grow(monkeypatch, tmp_path):
    amd, nvidia = Device("cuda:0", "0", HIP_VARIABLE), Device("cuda:0", "GPU-0")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in rank_environment(amd, "nccl", {})
    assert "PYTORCH_CUDA_ALLOC_CONF" in rank_environment(nvidia, "nccl", {})
    monkeypatch.setattr(crew, "WSL", tmp_path)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in rank_environment(nvidia, "nccl", {})


@pytest.fixture
def supervised():
    """(script, argument, ...) -> a supervisor of one process that has run it to its end."""
    made = []

    def run(script: str, *arguments: str) -> Supervisor:
        made.append(Supervisor())
        made[-1].start({0: Command((sys.executable, "-c", script, *arguments), dict(os.environ), 0)})
        assert made[-1].exit_of(0, DEADLINE_S) == 0
        return made[-1]

    yield run
    for one in made:
        one.stop(0)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "for n in range(100): print('line', n)\nprint('no newline', end='')",
            [*(f"line {number}" for number in range(100 - LOG_LINES, 100)), "no newline"],
        ),
        ("print('caf\\xe9')", ["café"]),
        ("for n in range(100): print(f'\\r{n}%', end='')\nprint('\\rdone')", ["done"]),
    ],
    ids=["lines", "letters", "a progress bar"],
)
def test_the_last_lines_of_a_rank_are_kept_as_a_terminal_shows_them(supervised, script, lines):
    assert supervised(script).tail(0) == lines


def test_braces_in_a_path_are_left_alone(supervised):
    said = supervised("import sys; print(sys.argv[1:])", "{fd}", "/home/{me}/{}", "{parent}").tail(0)
    assert said == [str(["0", "/home/{me}/{}", str(os.getpid())])]


def test_a_process_that_the_system_does_not_let_end_is_told_of_and_not_waited_for(monkeypatch, caplog):
    """As one that waits for a device which does not answer. It is reaped when it has ended."""
    monkeypatch.setattr(supervisor, "KILLED_S", 0.0)
    command = Command((sys.executable, "-c", "import time; time.sleep(60)"), dict(os.environ), 0)
    lets_end, made = threading.Event(), Supervisor()
    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda one: lets_end.wait(DEADLINE_S) and wait(one))
    made.start({0: command})
    made.stop(0)
    assert f"Rank 0 (process {made.pids[0]}) was killed and has not ended" in caplog.text
    lets_end.set()
    assert made.exit_of(0, DEADLINE_S) == -9


def test_where_one_rank_cannot_be_started_the_others_are_ended():
    good = Command((sys.executable, "-c", "import time; time.sleep(60)"), dict(os.environ), 0)
    made = Supervisor()
    with pytest.raises(FileNotFoundError):
        made.start({0: good, 1: Command(("/no/such/program",), {}, 0)})
    made.stop(0)
    assert len(made.pids) == 1
    assert not is_alive(made.pids[0])
