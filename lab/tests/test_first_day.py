"""Every step of a GPU's first day runs with the CPU in its place; each says figure and verdict."""

import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from pipemesh.lab.commands.first_day import run
from pipemesh.lab.first_day.place import Broken, Line, Place, on_ranks
from pipemesh.lab.first_day.steps import ON_ONE, ON_SEVERAL, Step
from pipemesh.tests.conftest import ROOT

HERE = Place("cpu", 2, SimpleNamespace(version="x"))


# Of several GPUs, those that one has not
@pytest.mark.parametrize(("gpus", "steps"), [(1, ON_ONE), (2, ON_SEVERAL[1:5])])
def test_every_step_says_a_figure_and_a_verdict_on_the_cpu(gpus, steps):
    numbers = range(1, 9) if gpus == 1 else range(2, 6)
    command = [sys.executable, "-m", "lab", "first-day", "--cuda-as", "cpu", "--gpus", str(gpus)]
    command += [f"--step={number}" for number in numbers]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ.copy(), check=False
    )
    said: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        if step := re.fullmatch(r"\d+\. (.+)", line):
            said[step[1]] = []
        elif line.startswith("   "):
            said[[*said][-1]].append(line)
    assert [*said] == [step.name for step in steps], ran.stderr
    for name, lines in said.items():
        assert lines and all(re.match(r"   ok   .*\w.*: \w", line) for line in lines), (
            name,
            lines,
            ran.stderr,
        )
    assert ran.returncode == 0 and ran.stdout.strip().endswith(f"{len(steps)} steps as they should be")


def failing(place):
    yield Line("1 ms")
    raise ValueError("no such kernel\nand more")


def wrong(place):
    yield Line("2 ms", "must be 1", fails=True)


def ending(place):
    os._exit(3)
    yield


def hanging(place):
    yield Line("3 ms")
    os.read(os.pipe()[0], 1)


def good(place):
    yield Line("4 ms")


def test_a_step_that_fails_ends_or_hangs_is_named_and_the_others_go_on():
    said, made = [], (failing, wrong, ending, hanging, good)
    steps = [Step(one.__name__, one, 3.0 if one is hanging else 60.0) for one in made]
    assert run(dict(enumerate(steps, 1)), HERE, said.append) == ["failing", "wrong", "ending", "hanging"]
    assert said == [
        "1. failing",
        "   ok   1 ms: fine",
        "   FAIL ValueError: no such kernel",
        "2. wrong",
        "   FAIL 2 ms: must be 1",
        "3. ending",
        "   FAIL its process ended with 3",
        "4. hanging",
        "   ok   3 ms: fine",
        "   FAIL took longer than 3 s",
        "5. good",
        "   ok   4 ms: fine",
    ]


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
