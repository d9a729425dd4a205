"""A pool over two hosts: network namespaces on this machine, leaders started by torchrun, ComfyUI's sampling in one of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pipemesh.launcher.devices import place
from pipemesh.launcher.parity import BOUND, relative_error
from pipemesh.launcher.pool import HostSetup, PoolHandle
from pipemesh.parallel_runtime.client.remote_model import Client
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout

from .models import load, run, with_lora
from .namespaces import NoNamespaces, TwoHosts, inside

ROOT = Path(__file__).resolve().parent.parent
RENDEZVOUS = "10.77.0.1:29400"
SECRET = "correct horse battery staple"
LOST_S = 3.0
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def hosts():
    try:
        two = TwoHosts()
    except NoNamespaces as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    yield two
    two.close()


def torchrun(namespace: str, name: str, *options: str) -> subprocess.Popen:
    """The command of docs/MULTI_NODE.md, on one of the hosts."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command = [*launch, f"--rdzv-endpoint={RENDEZVOUS}", *options, "-m", "launcher", "node", "--name", name]
    env = {**os.environ, "PIPEMESH_RDZV": RENDEZVOUS, "PIPEMESH_SECRET": SECRET, "PIPEMESH_LOST_S": str(LOST_S)}
    return subprocess.Popen(["ip", "netns", "exec", namespace, *command], cwd=ROOT, env=env, stdout=None, stderr=None)


@pytest.fixture(scope="module")
def leaders(hosts):
    """torchrun on both hosts. This machine's name means neither address, so the host of the rendezvous is told that it is."""
    started = [torchrun(hosts.near, "near", "--rdzv-conf=is_host=1"), torchrun(hosts.far, "far", "--rdzv-conf=is_host=0")]
    yield started
    hosts.cable("up")  # torchrun tells its rendezvous that it leaves
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def handle(setup, hosts, leaders):
    setup = HostSetup(**{**vars(setup), "rendezvous": RENDEZVOUS, "secret": SECRET, "lost_s": LOST_S})
    handle = PoolHandle(place(Layout(ulysses=2), "cpu,far/cpu", "gloo", ()), setup)
    yield handle
    handle.close()


def when_started(call, began=None):
    """Leaders take some seconds to join."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call()
        except PoolFailed as error:
            if time.monotonic() > deadline:
                raise
            print(error)
            time.sleep(0.5)


def test_two_hosts_sample_as_one(hosts, handle, files):
    stock = load(files["flux"])
    truth, patched = run(stock, cfg=2.0), run(with_lora(stock, files, 0.7))
    with inside(hosts.near):
        when_started(handle.ensure)
        model = parallelize(load(files["flux"]), Client(handle, shares_weights=False), holds_ui_device=False)
        assert relative_error(run(model, cfg=2.0), truth) <= BOUND
        assert relative_error(run(with_lora(model, files, 0.7)), patched) <= BOUND
        pool = handle.live()
        cutter = threading.Thread(target=cut_in_mid_run, args=(hosts, pool))
        cutter.start()
        began = time.monotonic()
        with pytest.raises(PoolFailed, match=r"^Host far was lost while computing \(rank 1 on far/cpu; ") as caught:
            run(model, size=(128, 128), steps=20)
        print(time.monotonic() - began, caught.value)
        cutter.join()
        hosts.cable("up")
        when_started(handle.ensure)
        assert relative_error(run(model, cfg=2.0), truth) <= BOUND


def cut_in_mid_run(hosts, pool):
    while pool.arena.board.phase(0) != "computing" or pool.arena.board.progress(0) % (1 << 32) < 6:
        time.sleep(0.001)
    hosts.cable("down")
