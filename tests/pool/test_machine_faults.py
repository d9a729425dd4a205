"""What befalls the other machine of a pool, in every phase of a run: it is named soon after the
silence that makes it lost, the next run is right, and nothing is left on either machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import product
from operator import gt
from pathlib import Path

import comfy.model_management as mm
import psutil
import pytest
import torch.distributed as dist
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.lab.in_process import reference
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.pool.devices import place
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.rendezvous import store_key

from ..fixtures import ALL
from ..kit.at_once import Once, in_forward
from ..kit.fake_pools import DEADLINE_S, SECRET
from ..kit.models import load, run
from ..kit.namespaces import Machines, machines_here

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
LOST_S = 2.0
NAMED_S = LOST_S + 10.0
DEVICES = "cpu,box/cpu"
FAULTS = ("killed", "its leader killed", "cut off", "stopped", "ten times slower")
PHASES = ("joining", "loading", "forward", "mid-pipeline", "between runs", "cancelling")
CELLS = list(product(FAULTS, PHASES)) if ALL else [("stopped", "forward")]
NAMED = r"PoolFailed: Machine box (was lost while [a-z]+ \(rank 1 on box/cpu; |does not answer at )"
STOP_S, GO_S = 0.09, 0.01  # of a machine that is ten times slower


class FarMachine:
    """The other machine: its leader, started as torchrun starts it (which gives up after some that
    were killed), and its ranks.
    """

    def __init__(self, machines: Machines, folder: Path):
        self._machines, self._log = machines, folder / "leader"
        desk = machines.addresses[machines.near]
        self.variables = {
            "PIPEMESH_RDZV": f"{desk}:{PORT}",
            "PIPEMESH_SECRET": SECRET,
            "PIPEMESH_LOST_S": str(LOST_S),
        }
        self._store = dist.TCPStore(desk, PORT, is_master=True, wait_for_workers=False)
        self._slow = threading.Event()

    def start(self, *before: str) -> None:
        key = store_key("box")
        self._store.delete_key(key)
        there = ("ip", "netns", "exec", self._machines.of("box"), *before)
        node = (sys.executable, "-m", "launcher", "node", "--name", "box")
        env = {**os.environ, **self.variables, "TORCHELASTIC_RUN_ID": "none"}
        with self._log.open("a") as log:
            self.leader = subprocess.Popen([*there, *node], cwd=ROOT, env=env, stdout=log, stderr=log)
        self._store.wait([key], timedelta(seconds=DEADLINE_S))

    def signal(self, number: int, pids: Sequence[int] = ()) -> None:
        for pid in pids or self._machines.pids("box"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        while self._machines.pids("box"):
            self.signal(signal.SIGKILL)
        self.leader.wait()

    def suffer(self, fault: str) -> None:
        match fault:
            case "killed":
                self.end()
            case "its leader killed":
                self.leader.kill()
            case "cut off":
                self._machines.cable("box", "down")
            case "stopped":
                self.signal(signal.SIGSTOP)
            case "ten times slower":
                self._slow.clear()
                threading.Thread(target=self._crawl, daemon=True).start()

    def _crawl(self) -> None:
        while not self._slow.is_set():
            pids = self._machines.pids("box")
            for _ in range(10):
                self.signal(signal.SIGSTOP, pids)
                self._slow.wait(STOP_S)
                self.signal(signal.SIGCONT, pids)
                if self._slow.wait(GO_S):
                    break

    def recover(self, fault: str) -> None:
        match fault:
            case "killed" | "its leader killed":
                self.leader.wait()
                self.start()
            case "cut off":
                self._machines.cable("box", "up")
            case "stopped":
                self.signal(signal.SIGCONT)
            case "ten times slower":
                self._slow.set()


class NearMachine:
    """ComfyUI's machine: a pool over both machines in each of two layouts, and the same MODELs as
    one process computes them.
    """

    def __init__(self, machines: Machines, box: FarMachine, setup, file: str):
        self._machines, self._box = machines, box
        self.steps = 0  # of the run
        self.handles, self.models = {}, {}
        for layout in (Layout(ulysses=2), Layout(pipefusion=2)):
            self.handles[layout.stages] = PoolHandle(place(layout, DEVICES, "gloo", ()), setup)
            client, in_stages = RemotePool(self.handles[layout.stages]), layout.stages > 1
            ours = parallelize(load(file), client, 0.0, Patching(3, 1) if in_stages else None)
            alone = load(file)
            self.models[layout.stages] = ours, reference(alone, 3, 1) if in_stages else alone
        self.truth = cache(lambda stages, *how: self.sampled(self.models[stages][1], *how))

    def sampled(self, model, steps=3, edge=8):
        def step(*_):
            self.steps += 1

        self.steps = 0
        return run(model, steps=steps, size=(edge, edge), callback=step)

    def is_right(self, stages: int, *how: int) -> bool:
        return relative_error(self.sampled(self.models[stages][0], *how), self.truth(stages, *how)) <= BOUND

    def is_in(self, phase: str, stages: int) -> bool:
        """Whether the run is where the fault is to come."""
        pool = self.handles[stages]._pool
        if pool is None:
            return False
        near, far = map(pool.arena.board.phase, (0, 1))
        of_phase = {
            "joining": near == "joining",
            "loading": far == "loading",
            "mid-pipeline": self.steps > 1 and far == "computing",
        }
        return of_phase.get(phase, in_forward(pool))

    def close(self) -> None:
        for handle in self.handles.values():
            handle.close()

    def left(self) -> list[int]:
        """Counts what both machines have beside what waits for the next pool: processes, ports on
        which somebody listens, and segments of the leader and of ComfyUI.
        """
        counts = []
        for name, own in (("box", self._box.leader.pid), ("desk", os.getpid())):
            others, links = [], []
            for pid in self._machines.pids(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    others += [pid] * (own not in (pid, psutil.Process(pid).ppid()))
            for one in Path(f"/proc/{own}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(one))
            segments = [link for link in links if link.startswith("/memfd:pipemesh")]
            counts += [len(others), len(listening(own)), len(segments)]
        return counts


def listening(pid: int) -> list[str]:
    """The ports on which somebody listens in a process's namespace."""
    tables = [Path(f"/proc/{pid}/net/{family}").read_text() for family in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sorted(fields[1] for fields in lines if fields[3] == "0A")


@pytest.fixture(scope="module")
def desk_and_box():
    with machines_here("desk", "box") as made, made.inside("desk"):
        yield made


@pytest.fixture(scope="module")
def box(desk_and_box, tmp_path_factory):
    made = FarMachine(desk_and_box, tmp_path_factory.mktemp("box"))
    made.start()
    yield made
    made.end()
    print(made._log.read_text())


@pytest.fixture(scope="module")
def desk(desk_and_box, box, setup, files):
    with desk_and_box.forking("desk", setup.start) as start:
        met = {"rendezvous": box.variables["PIPEMESH_RDZV"], "secret": SECRET, "lost_s": LOST_S}
        made = NearMachine(desk_and_box, box, replace(setup, **met, start=start), files["model"])
        yield made
        made.close()


@pytest.fixture
def leaves_nothing(desk):
    """After a test, with its pools closed, both machines have no more than before."""
    before = desk.left()
    yield
    desk.close()
    deadline = time.monotonic() + DEADLINE_S
    while any(map(gt, left := desk.left(), before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(gt, left, before)), (before, left)


@pytest.mark.parametrize(("fault", "phase"), CELLS)
def test_what_befalls_a_machine_is_named_and_the_next_run_is_right(leaves_nothing, desk, box, fault, phase):
    stages, is_slow = 2 if phase == "mid-pipeline" else 1, fault == "ten times slower"

    def strike():
        if phase == "cancelling":
            mm.interrupt_current_processing()
        box.suffer(fault)

    if phase == "between runs":
        assert desk.is_right(stages)
    striking = Once(lambda: phase == "between runs" or desk.is_in(phase, stages), strike)
    if phase == "between runs":
        striking.join()
    try:
        came = desk.is_right(stages, 4 if is_slow else 20, 128)
    except (PoolFailed, mm.InterruptProcessingException) as error:
        came = f"{type(error).__name__}: {error}"  # its traceback has the pool's memory mapped
    ended = time.monotonic()
    striking.join()
    mm.interrupt_current_processing(False)
    print(f"{fault}, {phase}: {ended - striking.acted_at:.1f} s: {came!s:.250}")
    if not (phase == "cancelling" and str(came).startswith("InterruptProcessingException")):
        assert came is True if is_slow else re.match(NAMED, str(came)), came
    assert is_slow or ended - striking.acted_at < NAMED_S
    if phase == "between runs" and not is_slow:
        with pytest.raises(PoolFailed, match=r"^Machine box does not answer at "):
            desk.is_right(stages)
    box.recover(fault)
    assert desk.is_right(stages)


@pytest.mark.skipif(not ALL, reason="PIPEMESH_TEST_ALL runs it")
def test_another_clock_changes_nothing(leaves_nothing, desk, box):
    box.end()
    box.start("unshare", "--time", "--fork", "--kill-child", "--monotonic", "100000")
    assert desk.is_right(1)
    assert desk.is_right(2)
    desk.close()
    box.end()
    box.start()
