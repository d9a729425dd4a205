"""Nothing is left behind: descriptors, shared memory, threads and processes, however a pool or its
UI ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from comfy.model_management import InterruptProcessingException, interrupt_current_processing
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import ModelError, PoolFailed, RunCancelled
from pipemesh.parallel_runtime.families.catalogue import PLAIN
from pipemesh.pool.pool import WorkerPool

from ..fixtures import ALL
from ..kit.fake_pools import DEADLINE_S, call, cpus, fake_setup, inside
from ..kit.holdings import NOTHING, Holdings
from ..kit.models import run

ROOT = Path(__file__).resolve().parents[2]


# -- the UI process

START, CLOSE = WorkerPool.start, WorkerPool.close
FORWARD = partial(call, kind="Forward")


def stopped_at_start(pool: WorkerPool) -> None:
    pool.start(lambda: True)


def stopped_while_loading(pool: WorkerPool) -> None:
    """Its answers are outstanding."""
    call(pool, "Load", inside(pool, "loading"))


def without_program(pool: WorkerPool) -> None:
    pool.ranks._crew._setup = replace(fake_setup(), argv=("/no/such/python",))


def loses_a_rank(pool: WorkerPool) -> None:
    psutil.Process(pool.ranks.pids[0]).kill()
    pool.ranks._crew.supervisor.exit_of(0, DEADLINE_S)


@pytest.mark.parametrize(
    ("rules", "acts", "state"),
    [
        ("", (CLOSE,), "closed"),
        ("", (START, FORWARD, CLOSE, CLOSE), "closed"),
        ("", (START, loses_a_rank, CLOSE), "closed"),
        ("*:Load=gated", (START, stopped_while_loading, CLOSE), "closed"),
        ("*:Start=gated", (stopped_at_start,), "closed"),
        ("", (without_program, START), "failed"),
        ("1:Start=die", (START,), "failed"),
        ("*:*=die-unheard", (START,), "failed"),
        ("1:Forward=die", (START, FORWARD), "failed"),
        ("1:Forward=kill-9 0:Forward=hang", (START, FORWARD), "failed"),
        ("1:Forward=leave", (START, FORWARD), "failed"),
        ("1:Forward=garbage", (START, FORWARD), "failed"),
        ("1:Forward=uneven-error", (START, FORWARD), "failed"),
    ],
)
def test_a_pool_leaves_nothing_in_the_ui_however_it_ends(rules, acts, state):
    before = Holdings.now()
    pool = WorkerPool(cpus(2), fake_setup(*rules.split()))
    assert Holdings.now().since(before) != NOTHING
    for act in acts:
        with suppress(PoolFailed, RunCancelled):
            act(pool)
    assert pool.state == state
    assert Holdings.now().since(before) == NOTHING  # and whoever still holds the object holds nothing else


# -- many runs

CASE = Case(PLAIN, "ulysses2", "odd", 5, 1.0, False, "euler")
KEY = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
MIB = 1 << 20


def patched(model, strength: float):
    clone = model.clone()
    clone.add_patches({KEY: ("diff", (torch.ones(clone.model.state_dict()[KEY].shape) * 1e-3,))}, strength)
    return clone


def misled(model) -> None:
    """A prompt of the wrong width: an error in every rank."""
    narrow = [[text[..., :-1], more] for text, more in conditioning(1, 5)]
    with pytest.raises(ModelError, match=r"^Rank 0 on cpu failed while computing: RuntimeError"):
        run(model, steps=1, positive=narrow, negative=narrow)


def interrupted(model) -> None:
    interrupt_current_processing()
    with pytest.raises(InterruptProcessingException):
        sample(model, CASE, steps=1)


def ranks_hold(pids: list[int]) -> list[tuple[int, int]]:
    """(descriptors, threads) of each rank."""
    return [(psutil.Process(pid).num_fds(), psutil.Process(pid).num_threads()) for pid in pids]


def resident(pids: list[int]) -> list[int]:
    return [psutil.Process(pid).memory_info().rss for pid in pids]


def test_many_runs_leave_nothing_in_the_ui_and_nothing_in_the_ranks(clients):
    """Among them runs that fail, runs that are cancelled and runs under other weight patches."""
    stock, client = stock_model(CASE.heads), clients(2)
    model = parallelize(stock, client, holds_ui_device=False)
    truth = sample(stock, CASE)

    def runs(*numbers: int) -> None:
        for number in range(*numbers):
            if number % 20 == 7:
                misled(model)
            elif number % 20 == 13:
                interrupted(model)
            elif number % 10 == 5:
                sample(patched(model, number / 100), CASE, steps=1)
            else:
                sample(model, CASE, seed=number, steps=1)

    runs(20)
    pool = client.sessions.live.pool
    pids = pool.ranks.pids
    before, arena, ranks = Holdings.now(), pool.arena.nbytes, ranks_hold(pids)
    memory = resident([*pids, os.getpid()])
    runs(20, 240 if ALL else 60)
    assert client.sessions.live.pool is pool
    assert Holdings.now().since(before) == NOTHING
    assert pool.arena.nbytes == arena
    assert ranks_hold(pids) == ranks
    grown = [now - then for now, then in zip(resident([*pids, os.getpid()]), memory, strict=True)]
    assert max(grown) < (24 if ALL else 12) * MIB, grown
    assert relative_error(sample(model, CASE), truth) <= BOUND


# -- the end of the UI

UI = """
import json, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests themselves run in the background
root, argv, forked, stuck = json.loads(sys.argv[1])
sys.path.insert(0, root + "/pool")
from package import register_package
register_package(root)
from pipemesh.pool.devices import place
from pipemesh.pool.fork_server import ForkServer
from pipemesh.pool.rank_setup import RankSetup
from pipemesh.pool.handle import PoolKeeper
from pipemesh.pool.supervisor import process_of_its_own
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.messages import Release

start = ForkServer(preloaded=()).start if forked else process_of_its_own
keeper = PoolKeeper(RankSetup(comfyui="", argv=tuple(argv), start=start))
pool = keeper.handle(place(Layout(ulysses=2), "cpu", "gloo", ())).ensure()
print(json.dumps(pool.ranks.pids), flush=True)


def is_stuck():  # a rank that never answers, asked by a thread such as ComfyUI's that samples
    if all(pool.arena.board.phase(rank) == "releasing" for rank in range(2)):
        print("null", flush=True)
    return False


if stuck:
    request = Release(request=pool.next_request(), model="m")
    threading.Thread(target=pool.ask, args=(request, (), is_stuck), daemon=True).start()
sys.stdin.readline()
"""


@contextmanager
def program(script: str, *words: str, **options):
    """A Python that runs a script, until the end of the block."""
    command = [sys.executable, "-c", script, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def ui(*rules: str, forked: bool, stuck: bool = False):
    """Another process with a pool of its own, and what is below it: its ranks, and the process that
    they are forked from. Checks in the end that all of these are gone, and their shared memory.
    """
    asked = json.dumps([str(ROOT), fake_setup(*rules).argv, forked, stuck])
    with program(UI, asked, stdin=subprocess.PIPE, bufsize=1) as process:
        ranks = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
        below = [*ranks, *({rank.parent() for rank in ranks} - {psutil.Process(process.pid)})]
        assert len(below) == 2 + forked
        yield process, below
        _gone, alive = psutil.wait_procs(below, DEADLINE_S)
        for one in alive:
            one.kill()
        assert not alive
        names = ("pipemesh", *(str(one.pid) for one in below))
        assert not [name for name in os.listdir("/dev/shm") if any(one in name for one in names)]


ENDS = {  # of the UI: the signal, and its ranks' rules
    "killed": (signal.SIGKILL, ["*:Start=deaf"]),
    "terminated": (signal.SIGTERM, ["*:Start=deaf"]),
    "Ctrl-C": (signal.SIGINT, []),
    "left": (None, []),
}
WAYS = [*((True, end) for end in ENDS), *((False, end) for end in (ENDS if ALL else ("killed", "left")))]


@pytest.mark.cover(3)
@pytest.mark.parametrize(("forked", "end"), WAYS)
def test_ranks_end_with_the_ui_however_it_ends(forked, end):
    """Also those that never look at their socket, and a stopped fork server, by the kernel."""
    number, rules = ENDS[end]
    with ui(*rules, forked=forked) as (process, below):
        if forked and end == "killed":
            below[-1].suspend()
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        process.wait(DEADLINE_S)


def test_ctrl_c_does_not_wait_for_a_rank_that_never_answers():
    with ui("*:Release=hang", forked=False, stuck=True) as (process, _below):
        assert process.stdout.readline() == "null\n", "asked, and waited for"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == -signal.SIGINT


DEEP_IN_A_COLLECTIVE = """
import socket, sys, threading
sys.path.insert(0, sys.argv[1] + "/pool")
from package import register_package
register_package(sys.argv[1])
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.parallel_runtime.wire.messages import ToRank
from pipemesh.parallel_runtime.worker.main import watch_parent
watch_parent(Channel(socket.socket(fileno=int(sys.argv[2])), ToRank))
print("watching", flush=True)
threading.Event().wait()
"""


def test_a_rank_that_never_looks_at_its_socket_ends_when_the_ui_is_gone():
    """Where the parent-death signal does not reach."""
    ours, theirs = socket.socketpair()
    with program(
        DEEP_IN_A_COLLECTIVE, str(ROOT), str(theirs.fileno()), pass_fds=[theirs.fileno()]
    ) as process:
        theirs.close()
        assert process.stdout.readline() == "watching\n"
        assert process.poll() is None
        ours.close()
        assert process.wait(DEADLINE_S) == 1
