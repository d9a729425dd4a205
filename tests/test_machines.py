"""A pool over two machines, which are network namespaces here: leaders started by torchrun,
ComfyUI's sampling in one of them.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import comfy.model_management
import psutil
import pytest
from pipemesh.lab.commands.parity import BOUND, Bench, Case, relative_error
from pipemesh.launcher.pool.devices import place
from pipemesh.launcher.pool.handle import PoolHandle
from pipemesh.launcher.pool.pool import WorkerPool
from pipemesh.launcher.pool.rank_setup import start_as
from pipemesh.launcher.pool.remote_machine import RemoteMachine
from pipemesh.launcher.pool.rendezvous import NODE_COMMAND, open_store, store_key
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.families.every import PLAIN
from pipemesh.parallel_runtime.layout import Layout

from .models import load, run, with_lora
from .namespaces import NoNamespaces, TwoMachines, inside
from .test_pool_faults import Once

ROOT = Path(__file__).resolve().parent.parent
PORT = 29400  # of the rendezvous
SECRET = "correct horse battery staple"
LOST_S = 3.0
DEADLINE_S = 60.0
SENT = Case(PLAIN, "ulysses2", "odd", 5, 1.0, False, "euler")  # a MODEL without a file: its weights are sent


@pytest.fixture(scope="module")
def machines():
    try:
        two = TwoMachines()
    except NoNamespaces as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    yield two
    two.close()


def rendezvous(machines: TwoMachines) -> str:
    return f"{machines.near_address}:{PORT}"


def torchrun(machines: TwoMachines, namespace: str, name: str, log: Path, has_store: int) -> subprocess.Popen:
    """The command that errors name and docs/MULTI_NODE.md explains, on one of the machines."""
    command = NODE_COMMAND.format(nodes=2, rendezvous=rendezvous(machines)).replace(
        "read_timeout=600", f"read_timeout=600,is_host={has_store}"
    )
    variable, _torchrun, *options = command.split()
    env = {
        **os.environ,
        **dict([variable.split("=")]),
        "PIPEMESH_RDZV": rendezvous(machines),
        "PIPEMESH_SECRET": SECRET,
        "PIPEMESH_LOST_S": str(LOST_S),
    }
    launch = [
        "ip",
        "netns",
        "exec",
        namespace,
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--name",
        name,
    ]
    with log.open("w") as output:
        return subprocess.Popen(launch, cwd=ROOT, env=env, stdout=output, stderr=output)


@pytest.fixture(scope="module")
def leaders(machines, tmp_path_factory):
    """torchrun on both machines. This computer's name means neither address, so the one that has
    the rendezvous is told that it is.
    """
    logs = [tmp_path_factory.mktemp("leaders") / name for name in ("near", "far")]
    started = [
        torchrun(machines, machines.near, "near", logs[0], has_store=1),
        torchrun(machines, machines.far, "far", logs[1], has_store=0),
    ]
    yield started
    machines.cable("up")  # torchrun tells its rendezvous that it leaves
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(DEADLINE_S)
    print(*(log.read_text() for log in logs), sep="\n")


@pytest.fixture(scope="module")
def truths(leaders, files):
    """What stock ComfyUI makes, computed while torchrun starts."""
    stock = load(files["model"])
    return run(stock, cfg=2.0), run(with_lora(stock, files, 0.7))


@pytest.fixture
def handle(setup, machines, leaders):
    """ComfyUI's end, on the near machine: what is called here runs in its namespace, and so does
    the process that ranks are forked from.
    """
    setup = replace(setup, rendezvous=rendezvous(machines), secret=SECRET, lost_s=LOST_S, start=start_as({}))
    handle = PoolHandle(place(Layout(ulysses=2), "cpu,far/cpu", "gloo", ()), setup)
    with inside(machines.near):
        yield handle
        handle.close()


def started(handle: PoolHandle, machines: TwoMachines) -> WorkerPool:
    """Its pool, once the leaders have joined."""
    open_store(machines.near_address, PORT, DEADLINE_S).wait(
        [store_key("near"), store_key("far")], timedelta(seconds=DEADLINE_S)
    )
    return handle.ensure()


def test_two_machines_sample_as_one_and_when_one_is_cut_off_it_is_named_and_the_next_run_is_right(
    machines, files, truths, handle
):
    plain, patched = truths
    first = started(handle, machines)
    client = RemotePool(handle, shares_weights=False)
    model = parallelize(load(files["model"]), client, holds_ui_device=False)
    assert relative_error(run(model, cfg=2.0), plain) <= BOUND
    assert relative_error(run(with_lora(model, files, 0.7)), patched) <= BOUND
    assert Bench(lambda *layout: client).error(SENT) <= BOUND

    said = listened_to(first.ranks._machines[0])
    cancelling = Once(lambda: in_forward(first), comfy.model_management.interrupt_current_processing)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(model, size=(128, 128), steps=20)
    cancelling.join()
    assert handle.live() is first
    assert first.idle
    # Of the evaluation, and of the run's end
    assert [(rank, answer.cancelled) for rank, answer in said[-2:]] == [(1, True), (1, False)]

    far_ranks = [
        os.pidfd_open(pid) for pid in machines.pids(machines.far) if forks(psutil.Process(pid).parent())
    ]
    assert len(far_ranks) == 1
    cutting = Once(lambda: in_forward(first), lambda: machines.cable("down"))
    with pytest.raises(
        PoolFailed,
        match=(
            r"^Machine far was lost while computing \(rank 1 on far/cpu; Connection timed out\): see that it"
            r" is up"
        ),
    ):
        run(model, size=(128, 128), steps=20)
    cutting.join()
    since_cut_s = time.monotonic() - cutting.acted_at
    assert since_cut_s < 3 * LOST_S
    with pytest.raises(
        PoolFailed, match=rf"^Machine far does not answer at {re.escape(machines.far_address)}:\d+ "
    ):
        run(model)
    for rank in far_ranks:  # on a machine that nobody can tell
        assert select.select([rank], [], [], DEADLINE_S)[0]
        os.close(rank)

    machines.cable("up")
    assert relative_error(run(model, cfg=2.0), plain) <= BOUND
    assert handle.live() is not first


def forks(process: psutil.Process) -> bool:
    return "fork_server_main.py" in " ".join(process.cmdline())


def listened_to(machine: RemoteMachine) -> list:
    """What its ranks say from now on."""
    said, pump = [], machine.pump

    def heard():
        said.extend(new := pump())
        return new

    machine.pump = heard
    return said


def in_forward(pool: WorkerPool) -> bool:
    """Rank 0 is some blocks deep."""
    return pool.arena.board.phase(0) == "computing" and pool.arena.board.progress(0) % (1 << 32) >= 6
