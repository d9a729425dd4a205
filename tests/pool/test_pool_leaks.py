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
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import ModelError, PoolFailed, RunCancelled
from pipemesh.parallel_runtime.families.catalogue import PLAIN
from pipemesh.pool.pool import WorkerPool

from ..fixtures import ALL
from ..kit.fake_pools import DEADLINE_S, call, cpus, fake_setup, inside
from ..kit.holdings import NOTHING, Holdings

ROOT = Path(__file__).resolve().parents[2]


# -- the UI process


def closed(pool: WorkerPool) -> None:
    pool.start()
    call(pool, "Forward")
    pool.close()
    pool.close()


def closed_without_a_rank(pool: WorkerPool) -> None:
    pool.start()
    psutil.Process(pool.ranks.pids[0]).kill()
    pool.ranks._crew.supervisor.exit_of(0, DEADLINE_S)
    pool.close()


def started_in_vain(pool: WorkerPool) -> None:
    pool.ranks._crew._setup = replace(fake_setup(), argv=("/no/such/python",))
    failed_at_start(pool)


def failed_in_a_request(pool: WorkerPool) -> None:
    pool.start()
    with pytest.raises(PoolFailed):
        call(pool, "Forward")


def failed_at_start(pool: WorkerPool) -> None:
    with pytest.raises(PoolFailed):
        pool.start()


def cancelled_at_start(pool: WorkerPool) -> None:
    with pytest.raises(RunCancelled):
        pool.start(lambda: True)


def closed_with_answers_outstanding(pool: WorkerPool) -> None:
    pool.start()
    with pytest.raises(RunCancelled):
        call(pool, "Load", inside(pool, "loading"))
    pool.close()


@pytest.mark.parametrize(
    ("end", "rules"),
    [
        (closed, ()),
        (closed_without_a_rank, ()),
        (started_in_vain, ()),
        (failed_in_a_request, ("1:Forward=die",)),
        (failed_in_a_request, ("1:Forward=kill-9", "0:Forward=hang")),
        (failed_in_a_request, ("1:Forward=leave",)),
        (failed_in_a_request, ("1:Forward=garbage",)),
        (failed_in_a_request, ("1:Forward=uneven-error",)),
        (failed_at_start, ("1:Start=die",)),
        (failed_at_start, ("*:*=die-unheard",)),
        (cancelled_at_start, ("*:Start=gated",)),
        (closed_with_answers_outstanding, ("*:Load=gated",)),
        (WorkerPool.close, ()),
    ],
    ids=lambda value: getattr(value, "__name__", " ".join(value) if isinstance(value, tuple) else None),
)
def test_a_pool_leaves_nothing_in_the_ui_however_it_ends(end, rules):
    before = Holdings.now()
    pool = WorkerPool(cpus(2), fake_setup(*rules))
    assert Holdings.now().since(before) != NOTHING
    end(pool)
    assert pool.state in ("closed", "failed")
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
    import comfy.sample

    latent = torch.zeros(1, 16, 8, 8)
    noise, prompt = comfy.sample.prepare_noise(latent, 1), conditioning(1, 5)
    prompt[0][0] = prompt[0][0][..., :-1]
    with (
        torch.inference_mode(),
        pytest.raises(ModelError, match=r"^Rank 0 on cpu failed while computing: RuntimeError"),
    ):
        comfy.sample.sample(
            model, noise, 1, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True
        )


def interrupted(model) -> None:
    import comfy.model_management

    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
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

    def one_run(number: int) -> None:
        if number % 20 == 7:
            misled(model)
        elif number % 20 == 13:
            interrupted(model)
        elif number % 10 == 5:
            sample(patched(model, number / 100), CASE, steps=1)
        else:
            sample(model, CASE, seed=number, steps=1)

    for number in range(20):
        one_run(number)
    pool = client.sessions.live.pool
    pids = pool.ranks.pids
    before, arena, ranks, memory = (
        Holdings.now(),
        pool.arena.nbytes,
        ranks_hold(pids),
        resident([*pids, os.getpid()]),
    )
    for number in range(20, 240 if ALL else 60):
        one_run(number)
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

start = ForkServer(preloaded=()).start if forked else process_of_its_own
keeper = PoolKeeper(RankSetup(comfyui="", argv=tuple(argv), start=start))
handle = keeper.handle(place(Layout(ulysses=2), "cpu", "gloo", ()))
pool = handle.ensure()
print(json.dumps(pool.ranks.pids), flush=True)


def is_stuck():  # a rank that never answers, asked by a thread such as ComfyUI's that samples
    if all(pool.arena.board.phase(rank) == "releasing" for rank in range(2)):
        print("null", flush=True)
    return False


if stuck:
    from pipemesh.parallel_runtime.wire.messages import Release

    request = Release(request=pool.next_request(), model="m")
    threading.Thread(target=pool.ask, args=(request, (), is_stuck), daemon=True).start()
sys.stdin.readline()
"""


class Ui:
    """Another process with a pool of its own."""

    def __init__(self, argv: tuple[str, ...], forked: bool, stuck: bool = False):
        arguments = [sys.executable, "-c", UI, json.dumps([str(ROOT), argv, forked, stuck])]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.below: list[psutil.Process] = []  # its ranks, and the process that they are forked from

    def said(self):
        line = self.process.stdout.readline()
        assert line, "the UI process has ended"
        return json.loads(line)

    def await_ranks(self) -> None:
        ranks = [psutil.Process(pid) for pid in self.said()]
        self.below = [*ranks, *({rank.parent() for rank in ranks} - {psutil.Process(self.process.pid)})]

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def assert_gone(ranks: list[psutil.Process]) -> None:
    assert ranks
    _gone, alive = psutil.wait_procs(ranks, DEADLINE_S)
    for rank in alive:
        rank.kill()
    assert not alive
    names = [
        name
        for name in os.listdir("/dev/shm")
        if "pipemesh" in name or any(str(rank.pid) in name for rank in ranks)
    ]
    assert not names


ENDS = {
    "killed": (signal.SIGKILL, ["*:Start=deaf"]),
    "terminated": (signal.SIGTERM, ["*:Start=deaf"]),
    "Ctrl-C": (signal.SIGINT, []),
    "left": (None, []),
}


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    ("forked", "number", "rules"),
    [pytest.param(True, *end, id=f"forked-{name}") for name, end in ENDS.items()]
    + [
        pytest.param(False, *end, id=f"programs-{name}")
        for name, end in ENDS.items()
        if ALL or name in ("killed", "left")
    ],
)
def test_ranks_end_with_the_ui_however_it_ends(number, rules, forked):
    """Those that never look at their socket too: the kernel ends them."""
    ui = Ui(fake_setup(*rules).argv, forked)
    ui.await_ranks()
    if number is None:
        ui.process.stdin.close()
    else:
        ui.process.send_signal(number)
    ui.process.wait(DEADLINE_S)
    assert len(ui.below) == 2 + forked
    assert_gone(ui.below)
    ui.close()


@pytest.mark.cover(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_server_that_is_stopped_ends_with_the_ui_too(number):
    ui = Ui(fake_setup().argv, forked=True)
    ui.await_ranks()
    ui.below[-1].suspend()
    ui.process.send_signal(number)
    assert_gone(ui.below)
    ui.close()


def test_ctrl_c_does_not_wait_for_a_rank_that_never_answers():
    ui = Ui(fake_setup("*:Release=hang").argv, forked=False, stuck=True)
    ui.await_ranks()
    assert ui.said() is None, "asked, and waited for"
    ui.process.send_signal(signal.SIGINT)
    try:
        assert ui.process.wait(DEADLINE_S) == -signal.SIGINT
        assert_gone(ui.below)
    finally:
        ui.close()


DEEP_IN_A_COLLECTIVE = """
import socket, sys, threading
sys.path.insert(0, sys.argv[1] + "/pool")
from package import register_package
register_package(sys.argv[1])
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.parallel_runtime.wire.messages import ToRank
from pipemesh.parallel_runtime.worker.main import watch_parent
channel = Channel(socket.socket(fileno=int(sys.argv[2])), ToRank)
watch_parent(channel)
print("watching", flush=True)
threading.Event().wait()
"""


def test_a_rank_that_never_looks_at_its_socket_ends_when_the_ui_is_gone():
    """Where the parent-death signal does not reach."""
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-c", DEEP_IN_A_COLLECTIVE, str(ROOT), str(theirs.fileno())]
    process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    try:
        assert process.stdout.readline() == "watching\n"
        assert process.poll() is None
        ours.close()
        assert process.wait(DEADLINE_S) == 1
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
