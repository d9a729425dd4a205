"""Checks two at a time, by commands that stand for them, and tests that two processes share."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipemesh.lab import lanes
from pipemesh.lab.forks import forking, in_a_fork

from .conftest import ROOT
from .in_turns import handed_out

MEETS = """
import os, sys
name = sys.argv[2]
for mode in ("w", "r") if name == "one" else ("r", "w"):  # opened once the other has its end
    open(sys.argv[1], mode).close()
print("..... [ 50%]")
print("0.7s call " + name, "1.5s setup " + name, "10.0s call " + name, sep=os.linesep)
print(name, "has ended")
sys.exit(name == os.environ["FAILS"])
"""


@pytest.mark.parametrize("fails", ["neither", "one", "two"])
def test_two_checks_run_at_once_and_what_fails_is_the_result_and_printed_last(tmp_path, capfd, fails):
    os.mkfifo(meeting := tmp_path / "meeting")
    checks = {name: [sys.executable, "-c", MEETS, str(meeting), name] for name in ("one", "two")}
    checks["three"] = [sys.executable, "-c", "print('last')"]
    assert lanes.run(checks, {**os.environ, "FAILS": fails}, ROOT) == (fails != "neither")
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[:5]) == ["one", "one", "three", "two", "two"]
    passed = [name for name in ("one", "two") if name != fails]
    slowest = ["10.0s call one", "10.0s call two", "1.5s setup one", "1.5s setup two"]
    assert lines[5:] == [
        *(line for name in passed for line in (f"== {name}", f"{name} has ended")),
        *("== three", "last", "== the slowest tests", *slowest, "0.7s call one", "0.7s call two"),
        *([] if fails == "neither" else [f"== {fails}", f"{fails} has ended", f"== failed: {fails}"]),
    ]


FORK = """
import imported_once, os, sys
print("forked", *sys.argv[1:])
os.kill(os.getpid(), 9) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("ends", "status"), [("0", 0), ("3", 3), ("killed", 9)])
def test_a_check_in_a_fork_says_what_it_says_and_ends_as_it_does(tmp_path, capfd, ends, status):
    """Of a process that has imported: what it has imported is not there any more."""
    (tmp_path / "imported_once.py").touch()
    (script := tmp_path / "script.py").write_text(FORK)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with forking(sys.executable, env, "imported_once") as control:
        first = in_a_fork(control, script, "0", "{fd}")
        assert lanes.run({"first": first}, os.environ, ROOT, [control]) == 0
        (tmp_path / "imported_once.py").unlink()
        again = in_a_fork(control, script, ends)
        assert lanes.run({"again": again}, os.environ, ROOT, [control]) == status
    said = capfd.readouterr().out
    assert re.search(r"forked 0 \d+\n", said) and f"forked {ends}\n" in said


def item(file, *fixtures):
    return SimpleNamespace(path=Path(f"{file}.py"), fixturenames=fixtures)


def test_each_test_is_taken_by_one_process_and_those_that_share_pools_by_the_same(tmp_path):
    first, pools, second, server = item("a"), item("a", "clients"), item("b"), item("c", "server")
    again, broken = item("b"), item("d", "setup", "broken")
    items = [first, pools, second, server, again, broken]
    one, other = handed_out(items, tmp_path), handed_out(items, tmp_path)
    assert [next(one), next(other)] == [pools, server]
    assert [next(one), next(other)] == [broken, first]
    assert list(other) == [second, again] and list(one) == []


@pytest.mark.parametrize(
    ("options", "of_all"),
    [
        ("", True),
        ("-q -x --durations=30 --tb=short", True),
        ("-q tests/test_waist.py", False),
        ("-k lora", False),
        ("--taken=/somewhere", False),
        ("--lf", False),
    ],
)
def test_what_chooses_tests_is_one_process(options, of_all):
    assert lanes.is_of_all(options.split()) == of_all
