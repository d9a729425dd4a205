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
from pipemesh.pool import crew, supervisor
from pipemesh.pool.conversation import StallClock
from pipemesh.pool.crew import KEEP_MEMORY, rank_environment
from pipemesh.pool.devices import HIP_VARIABLE, Device
from pipemesh.pool.supervisor import LOG_LINES, Command, Supervisor

from ..kit.fake_pools import (
    DEADLINE_S,
    Clock,
    assert_over,
    call,
    failing,
    fake_setup,
    gate,
    handled,
    is_alive,
    near_and_far,
    stages,
    submitted,
    through,
)
from ..kit.fake_worker import LESS_MEMORY


def test_a_group_works_by_itself_and_others_neither_hear_of_it_nor_lose_what_they_told_of_memory(started):
    pool = started(3, "1:Forward=fill-up", "2:Forward=gated")
    free = [memory.free for memory in pool.memory]
    slow, quick = submitted(pool, group=(2,)), submitted(pool, group=(1,))
    assert list(pool.collect(quick)) == [1], "the other group is still at its own"
    assert [memory.free for memory in pool.memory] == [free[0], LESS_MEMORY[0], free[2]]
    gate(pool).fill_(1)
    assert list(pool.collect(slow)) == [2]
    assert handled(pool) == ["Start Release", "Start Forward Release", "Start Forward Release"]


# -- a rank that cannot go on


@near_and_far
def test_a_rank_that_dies_is_named_with_its_last_lines(started, devices):
    pool = started(devices, "2:Load=die")
    pids = pool.ranks.pids
    with pytest.raises(PoolFailed) as caught:
        call(pool, "Load")
    lines = "\n".join(f"  line {number}" for number in range(8, 20))
    assert str(caught.value) == (
        f"Rank 2 on {devices.split(',')[2]} ended with exit status 3 while loading: run again, a fresh pool"
        f" will be started.\nLast lines of rank 2:\n{lines}\n  the last thing I saw"
    )
    assert_over(pool, [pid for pid in pids if pid])


AGAIN = "run again, a fresh pool will be started"


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        (
            fake_setup("1:Start=die"),
            rf"Rank 1 on cpu ended with exit status 3 while importing: {AGAIN}\.\nLast",
        ),
        # Before they hear a word, whether the first word still reached the socket or not
        (
            fake_setup("*:*=die-unheard"),
            rf"Rank [01] on cpu ended with exit status 4 while starting: {AGAIN}\.\n"
            r"Last lines of rank [01]:\n  no library of that name$",
        ),
        (
            replace(fake_setup(), argv=("/no/such/python",)),
            r"The worker processes could not be started \(\[Errno 2\] No such file or directory:"
            r" '/no/such/python'\): free memory or processes and run again\.$",
        ),
    ],
    ids=["one dies", "all die unheard", "no program"],
)
def test_ranks_that_cannot_start_are_named(started, setup, sentence):
    pool = started.made(2)
    pool.ranks._crew._setup = setup
    with pytest.raises(PoolFailed, match=f"^{sentence}"):
        pool.start()
    assert_over(pool, pool.ranks.pids)


UNKNOWN = (
    "Rank 1 on cpu sent a message this version of PipeMesh does not know (Invalid value 'Nonsense' - at"
    " `$.type`): restart ComfyUI."
)
HANGS, SOON_S = "Rank 1 on cpu made no progress", {"stall_s": 0.5}
TO_BLAME = {  # kind, rules, beginning of the sentence, more of the pool
    "it dies while patching": ("SetWeightPatches", ("1:SetWeightPatches=die",), f"Rank 1 on cpu ended with exit status 3 while patching: {AGAIN}", {}),
    "another waits for it": ("Forward", ("1:Forward=die", "0:Forward=hang"), f"Rank 1 on cpu ended with exit status 3 while computing: {AGAIN}", {}),
    "it speaks another schema": ("Load", ("1:Load=garbage",), UNKNOWN, {}),
    # The others count on for a while, then wait as in a collective: rank 1 has hung from the start
    "others wait for it": ("Forward", ("0:Forward=tick-then-hang", "1:Forward=hang"), HANGS, SOON_S),
    "and another fell behind earlier": ("Forward", ("1:Load=slow", "0:Forward=tick-then-hang", "1:Forward=hang"), HANGS, {"first": "Load", **SOON_S}),
    # Rank 0's error is there first: its peer is gone, which is noticed while others are waited for
    "it dies and others fail of it": ("Forward", ("0:Forward=uneven-error", "1:Forward=slow-then-die"), "Rank 1 on cpu ended with exit status 3", {}),
}  # fmt: skip


@pytest.mark.parametrize("how", TO_BLAME)
def test_the_rank_to_blame_is_named_with_what_it_did(how):
    kind, rules, sentence, more = TO_BLAME[how]
    assert failing(2, *rules, kind=kind, **more).startswith(sentence)


def test_a_rank_whose_child_outlives_it_is_noticed_and_reaped():
    sentence = failing(2, "1:Load=die-with-child", kind="Load")
    assert sentence.startswith("Rank 1 on cpu ended with exit status 3 while loading")
    psutil.Process(int(re.search(r"grandchild (\d+)$", sentence).group(1))).kill()


def test_hangs_are_judged_by_counters_alone():
    clock, counters = Clock(), {0: 0, 1: 0}
    watch = StallClock(counters.get, clock)
    for _ in range(50):  # one of two ticks every nine seconds: for ever healthy
        clock.now += 9.0
        counters[1] += 1
        assert watch.stalled_rank([0, 1], 10.0) is None
    for later_s, ranks, stalled in (
        (10.0, [0, 1], None),
        (0.1, [0, 1], 0),
        (0.0, [1], None),  # rank 0 has answered: another question, a new start
        (10.1, [1], 1),
    ):
        clock.now += later_s
        assert watch.stalled_rank(ranks, 10.0) == stalled
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
    pool = started(stages(3), "0:Forward=error", "1:Forward=cancellable", "2:Forward=cancellable")
    with pytest.raises(ModelError, match=r"^Rank 0 on cpu failed while computing"):
        through(pool)
    assert handled(pool) == ["Start Forward Release"] * 3


# -- the environment of ranks

GPU, AMD, ON_CPU = Device("cuda:0", "GPU-0"), Device("cuda:0", "0", HIP_VARIABLE), Device("cpu")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
BREAKS = {"RANK": "0", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
OF_GPUS = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    ALLOCATOR: "expandable_segments:True",
}


def test_between_hosts_gloo_and_nccl_take_the_interface_between_them_and_nccl_the_users():
    for own, of_nccl in (({}, "eth7"), ({"NCCL_SOCKET_IFNAME": "ib0"}, "ib0")):
        env = rank_environment(GPU, "nccl", own, "eth7")
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth7", of_nccl)


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        *((GPU, backend, {"CUDA_VISIBLE_DEVICES": "GPU-0", **OF_GPUS}) for backend in ("nccl", "gloo")),
        (ON_CPU, "gloo", {"CUDA_VISIBLE_DEVICES": "", **KEEP_MEMORY}),
    ],
)
def test_on_one_host_ranks_see_their_own_gpu_listen_on_loopback_alone_and_have_nothing_that_breaks_them(
    device, backend, expected
):
    own = {"PATH": "/bin", **BREAKS}
    if device is GPU:
        own[ALLOCATOR] = "backend:cudaMallocAsync"  # ComfyUI's own choice
    assert rank_environment(device, backend, own) == {"PATH": "/bin", **LOOPBACK, **expected}


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        (ALLOCATOR, "max_split_size_mb:512,backend:cudaMallocAsync", "max_split_size_mb:512"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "expandable_segments:False"),
    ],
    ids=["joined to ComfyUI's", "of another name"],
)
def test_what_the_user_has_set_for_gpus_stays(name, value, left):
    own = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "TORCH_NCCL_ENABLE_MONITORING": "1"}
    env = rank_environment(GPU, "nccl", {**own, name: value})
    assert {one: env[one] for one in own} == own
    assert {one: env[one] for one in env if "ALLOC_CONF" in one} == {name: left}


def test_amds_gpus_and_those_of_wsl_get_no_segments_that_grow(monkeypatch, tmp_path):
    assert ALLOCATOR not in rank_environment(AMD, "nccl", {})
    assert ALLOCATOR in rank_environment(GPU, "nccl", {})
    monkeypatch.setattr(crew, "WSL", tmp_path)
    assert ALLOCATOR not in rank_environment(GPU, "nccl", {})


# -- processes


def python(script: str, *arguments: str) -> Command:
    return Command((sys.executable, "-c", script, *arguments), dict(os.environ), 0)


SLEEPS = python("import time; time.sleep(60)")


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            python("for n in range(100): print('line', n)\nprint('no newline', end='')"),
            [*(f"line {number}" for number in range(100 - LOG_LINES, 100)), "no newline"],
        ),
        (python("print('caf\\xe9')"), ["café"]),
        (python("for n in range(100): print(f'\\r{n}%', end='')\nprint('\\rdone')"), ["done"]),
        (
            python("import sys; print(sys.argv[1:])", "{fd}", "/home/{me}/{}", "{parent}"),
            [str(["0", "/home/{me}/{}", str(os.getpid())])],
        ),
    ],
    ids=["lines", "letters", "a progress bar", "braces in a path"],
)
def test_the_last_lines_of_a_rank_are_kept_as_a_terminal_shows_them(command, lines):
    made = Supervisor()
    made.start({0: command})
    assert made.exit_of(0, DEADLINE_S) == 0
    assert made.tail(0) == lines
    made.stop(0)


def test_a_process_that_the_system_does_not_let_end_is_told_of_and_not_waited_for(monkeypatch, caplog):
    """As one that waits for a device which does not answer. It is reaped when it has ended."""
    monkeypatch.setattr(supervisor, "KILLED_S", 0.0)
    lets_end, made, wait = threading.Event(), Supervisor(), subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda one: lets_end.wait(DEADLINE_S) and wait(one))
    made.start({0: SLEEPS})
    made.stop(0)
    assert f"Rank 0 (process {made.pids[0]}) was killed and has not ended" in caplog.text
    lets_end.set()
    assert made.exit_of(0, DEADLINE_S) == -9


def test_where_one_rank_cannot_be_started_the_others_are_ended():
    made = Supervisor()
    with pytest.raises(FileNotFoundError):
        made.start({0: SLEEPS, 1: Command(("/no/such/program",), {}, 0)})
    made.stop(0)
    assert len(made.pids) == 1
    assert not is_alive(made.pids[0])
