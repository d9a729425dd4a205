"""All tests in two lanes side by side, by commands that stand for pytest."""

import os
import sys

import pytest
from pipemesh.launcher import lanes

from .conftest import LANES, ROOT

MEETS = """
import os, sys
options, (_, lane) = sys.argv[2:-1], sys.argv[-1].split("--lane=")
assert options[0] == "-q"
for mode in ("w", "r") if lane == "shared" else ("r", "w"):  # opened once the other lane has its end
    open(sys.argv[1], mode).close()
print("..... [ 50%]")
print("0.7s call " + lane, "1.5s setup " + lane, "10.0s call " + lane, sep=os.linesep)
print(lane, "has ended")
sys.exit(lane == os.environ["FAILS"])
"""


@pytest.mark.parametrize("fails", ["neither", *LANES])
def test_both_lanes_run_at_once_and_one_that_fails_is_the_result(tmp_path, capfd, fails):
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    command = [sys.executable, "-c", MEETS, str(meeting)]
    assert lanes.run(command, ["-q"], {**os.environ, "FAILS": fails}, ROOT) == (fails != "neither")
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines[:2]) == ["other  ..... [ 50%]", "shared ..... [ 50%]"]
    assert [line for line in lines if "has ended" in line or "==" in line] == [
        *("== lane shared", "shared has ended", "== lane other", "other has ended"),
        "== the slowest tests of both lanes",
    ]
    assert lines[-6:-4] == ["10.0s call shared", "10.0s call other"] and lines[-2:] == [
        "0.7s call shared",
        "0.7s call other",
    ]


@pytest.mark.parametrize(
    ("options", "of_all"),
    [
        ("", True),
        ("-q -x --durations=30 --tb=short", True),
        ("-q tests/test_waist.py", False),
        ("-k lora", False),
        ("--lane=shared", False),
        ("--lf", False),
    ],
)
def test_what_chooses_tests_is_one_process(options, of_all):
    assert lanes.is_of_all(options.split()) == of_all
