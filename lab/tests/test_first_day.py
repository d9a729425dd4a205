"""Every step of a GPU's first day runs with the CPU in its place, and all that can with a late GPU;
each says figure and verdict.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import comfy.cli_args
import pytest
import torch
from pipemesh.lab.commands.first_day import main, run
from pipemesh.lab.first_day import one_rank, place, steps
from pipemesh.lab.first_day.place import Broken, Line, Place, on_ranks
from pipemesh.lab.first_day.staged import Staged
from pipemesh.lab.first_day.steps import OF_POOLS, ON_ONE, ON_SEVERAL, Step
from pipemesh.launcher.comfyui.host_record import ComfyInstall
from pipemesh.nodes import local_devices
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT, Kernels
from pipemesh.parallel_runtime.comm.exchange import Exchange
from pipemesh.parallel_runtime.families.catalogue import RELEASED
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.tests.fixtures import ROOT
from pipemesh.tests.kit.late_device import late_device
from pipemesh.tests.kit.late_ranks import LateWorld

HERE = Place("cpu", 2, ComfyInstall.from_json(os.environ["PIPEMESH_HOST"]), is_tiny=True)
STEPS = [*((1, one) for one in ON_ONE), *((2, one) for one in ON_SEVERAL[1:5])]
IN_POOLS = [(gpus, step) for gpus, step in STEPS if step.never_late == OF_POOLS]
ON_CPU = [one for one in STEPS if one not in IN_POOLS]
LATE = [(gpus, step) for gpus, step in STEPS if not step.never_late]


def each(cases):
    ids = [f"{gpus} {step.name}" for gpus, step in cases]
    return pytest.mark.parametrize(("gpus", "step"), cases, ids=ids)


def taken(step, place):
    said = []
    run({1: step}, place, said.append)
    return said[1:]


def is_well(said):
    return said and all(re.match(r"   ok   .*\w.*: \w", line) for line in said)


def test_the_process_that_forks_the_steps_has_not_imported_comfyui():
    """Its modules ask for GPUs, and a process that has asked cannot be forked."""
    code = (
        "import runpy, sys; runpy.run_path('pool/package.py')['register_package'](__import__('pathlib').Path())"
        "; import pipemesh.lab.commands.first_day; print([one for one in sys.modules if one[:5] == 'comfy'])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def whole():
    """Counted before any step is taken, with which their processes have imported what they need."""
    return one_rank.whole_of(one_rank.sized(RELEASED[one_rank.MODEL][1], HERE, HERE.own()))


@each(ON_CPU)
def test_every_step_says_a_figure_and_a_verdict_on_the_cpu(gpus, step, whole):
    said = taken(step, replace(HERE, ranks=gpus))
    assert is_well(said), said


@each(IN_POOLS)
def test_every_step_with_pools_says_a_figure_and_a_verdict(gpus, step, clients, setup, monkeypatch):
    """Here, and with ``clients``, by which the ranks are forked from where others are."""
    args = comfy.cli_args.args
    monkeypatch.setattr(args, "use_pytorch_cross_attention", args.use_pytorch_cross_attention)
    monkeypatch.setattr(local_devices, "rank_setup", lambda environ: setup)
    said = [*step.run(replace(HERE, ranks=gpus))]
    assert said and not any(line.fails for line in said)


@pytest.fixture
def on_late(monkeypatch, whole):
    """A step's ranks are those of a world of late GPUs, whose kernels no profiler sees."""
    monkeypatch.setattr(Kernels, "choose", lambda self, ask: EXPLICIT)
    monkeypatch.setattr(one_rank, "whole_of", lambda released: whole)
    sent = SimpleNamespace(wait=lambda: None)  # by a rank alone, to nobody
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *args, **kwargs: sent)

    def ranks(place, number, share_one, of_rank, limit_s):
        with pytest.MonkeyPatch.context() as patch, late_device() as box:
            world, found = LateWorld(Layout(ulysses=number), box, patch), {}
            world.members["all"], came = tuple(range(number)), defaultdict(set)
            for gpu in world.gpus if share_one else ():
                gpu.device = place.own()

            def connected(layout, rank, **_):
                came[layout].add(rank)
                while len(came[layout]) < number:  # to join is a message too, which is not played here
                    world.give_way(None)
                world.layout = layout
                return world._join(rank, patch)

            def work(mesh, run):
                found[mesh.rank] = of_rank(mesh.rank, "nccl")

            for module in (steps, one_rank):
                patch.setattr(module, "connect", connected)
            patch.setattr(torch.distributed, "get_world_size", lambda: number)
            patch.setattr(one_rank, "profiled", partial(launched, box))
            world.run(work)
            return "late", [found[rank] for rank in range(number)]

    for module in (steps, one_rank):
        monkeypatch.setattr(module, "on_ranks", ranks)


def launched(box, act, device):
    before = box.gpu.launches.total()
    act()
    return 1.0, box.gpu.launches.total() - before


@each(LATE)
def test_every_step_says_a_figure_and_a_verdict_on_a_late_gpu(gpus, step, on_late, monkeypatch):
    with late_device() as box:
        monkeypatch.setattr(one_rank, "profiled", partial(launched, box))
        said = taken(step, replace(HERE, device="cuda", ranks=gpus))
    assert is_well(said), said


def test_what_is_timed_has_ended_when_its_time_is_taken():
    with late_device() as box:
        one, ended = torch.ones(8, device=torch.device("cuda", 0)), []
        clock = SimpleNamespace(perf_counter=lambda: ended.append(box.gpu.current.last.is_over) or 0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "time", clock)
            place.milliseconds(lambda: one.add_(1), torch.device("cuda", 0))
    assert len(ended) == 2 * (9 + 2) and all(ended)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_whose_ranks_get_other_numbers_than_were_sent_fails(device, on_late, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(steps, "on_ranks", on_ranks)
    monkeypatch.setattr(Exchange, "all_to_all", lambda *args: None)
    (step,) = (one for one in ON_ONE if one.run is steps.several_on_one)
    (said,) = taken(step, replace(HERE, device=device))
    assert re.fullmatch(r"   FAIL (Broken: )?rank \d got other numbers than were sent", said), said


def test_a_set_of_ranks_that_gets_other_numbers_by_copies_fails_and_the_next_is_tried(monkeypatch):
    monkeypatch.setattr(Staged, "all_to_all", lambda *args: None)
    (step,) = (one for one in ON_ONE if one.run is steps.by_copies)
    said = taken(step, HERE)
    assert len(said) == 2 and all("numbers other than sent" in line and "FAIL" in line for line in said)


def test_why_a_step_is_not_tried_on_a_late_gpu_is_in_the_document():
    said = " ".join((ROOT / "lab/docs/CUDA.md").read_text().split())
    reasons: dict[str, dict[str, None]] = {}
    for step in (*ON_ONE, *ON_SEVERAL):
        if step.never_late:
            reasons.setdefault(step.never_late, {})[f"*{step.name}*"] = None
    for why, names in reasons.items():
        assert f"{' and '.join(names)}: {why}" in said


def test_the_command_takes_the_steps_that_are_asked_for_by_their_numbers(capsys):
    asked = ["--cuda-as", "cpu", "--gpus", "1", "--step", "3", "--step", "6"]
    assert main(asked, HERE.host) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert said == [f"3. {ON_ONE[2].name}", f"6. {ON_ONE[5].name}", "2 steps as they should be"]


def failing(place):
    yield Line("1 ms")
    raise ValueError("no such kernel\nand more")


def wrong(place):
    yield Line("2 ms", "must be 1", fails=True)


def ending(place):
    yield os._exit(3)


def hanging(place):
    yield Line("3 ms")
    os.read(os.pipe()[0], 1)


def good(place):
    yield Line("4 ms")


SAID = """1. failing
   ok   1 ms: fine
   FAIL ValueError: no such kernel
2. wrong
   FAIL 2 ms: must be 1
3. ending
   FAIL its process ended with 3
4. hanging
   ok   3 ms: fine
   FAIL took longer than 2 s
5. good
   ok   4 ms: fine"""


def test_a_step_that_fails_ends_or_hangs_is_named_and_the_others_go_on():
    said, made = [], (failing, wrong, ending, hanging, good)
    steps = [Step(one.__name__, one, 2.0 if one is hanging else 60.0) for one in made]
    assert run(dict(enumerate(steps, 1)), HERE, said.append) == ["failing", "wrong", "ending", "hanging"]
    assert said == SAID.splitlines()


def one_fails(rank, backend):
    if rank == 1:
        raise ValueError("rank 1 is out of memory")
    return rank


def test_a_rank_that_fails_ends_a_step_at_once_and_is_named():
    with pytest.raises(Broken, match="rank 1 is out of memory"):
        on_ranks(HERE, 2, True, one_fails, 60.0)
    assert on_ranks(HERE, 2, True, partial(lambda rank, backend: (rank, backend)), 60.0) == (
        "gloo",
        [(0, "gloo"), (1, "gloo")],
    )
