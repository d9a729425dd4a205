"""Runs checks several at a time, and prints last what has failed.

Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

AT_ONCE = 4  # on two cores: tests wait for processes that start, hang or are lost
SHARES = 3  # of one folder's tests
# Options of a run of all tests
ALL = re.compile(r"-[qvxsl]+|-r\w+|--(durations|durations-min|tb|color|maxfail)=\S+")
PROGRESS = re.compile(r"\[ *\d+%\]$")
DURATION = re.compile(r" *([0-9.]+)s (call|setup|teardown) ")
SLOWEST = 30


def is_of_all(options: Sequence[str]) -> bool:
    """Return whether pytest runs all tests with these options. Any other may choose some of them,
    or do something else.
    """
    return all(ALL.fullmatch(option) for option in options)


def in_turns(name: str, pytest: Sequence[str], taken: Path) -> dict[str, list[str]]:
    """Returns commands of equal pytests that share their tests: each takes, again and again, the
    next that none has taken in the folder `taken` (tests/conftest.py).
    """
    taken.mkdir()
    # `--taken FOLDER` in two words: pytest looks for conftest.py in FOLDER.
    return {f"{name} {number + 1}": [*pytest, f"--taken={taken}"] for number in range(SHARES)}


@dataclass(frozen=True)
class Done:
    name: str
    code: int
    lines: Sequence[str]

    def print(self) -> None:
        print(f"== {self.name}", *(line for line in self.lines if not DURATION.match(line)), sep="\n")


def run(
    checks: Mapping[str, Sequence[str]], env: Mapping[str, str], folder: Path, fds: Collection[int] = ()
) -> int:
    """Runs commands by their names, each of which has the descriptors ``fds``. Prints lines of
    progress at once, then what each has said, with the slowest tests of all, where they are asked
    for, before what has failed. Returns 0 if all have passed.
    """

    def run_one(name: str) -> Done:
        lines = []
        with subprocess.Popen(
            checks[name],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if PROGRESS.search(lines[-1]):
                    say(name, lines[-1])
        say(name, lines[-1] if lines else "has ended")
        return Done(name, process.returncode, [line for line in lines if not PROGRESS.search(line)])

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        every = sorted(lanes.map(run_one, checks), key=lambda one: one.code != 0)
    for done in every:
        if done.code == 0:
            done.print()
    if timed := [line for done in every for line in done.lines if DURATION.match(line)]:
        timed.sort(key=lambda line: (-seconds(line), line))
        print("== the slowest tests", *timed[:SLOWEST], sep="\n")
    failed = [done for done in every if done.code]
    for done in failed:
        done.print()
    if failed:
        print("== failed:", ", ".join(done.name for done in failed), flush=True)
    return next((done.code for done in failed), 0)


def say(name: str, line: str) -> None:
    # One write: print() writes the end of the line by itself.
    sys.stdout.write(f"{name:13}{line}\n")
    sys.stdout.flush()


def seconds(line: str) -> float:
    match = DURATION.match(line)
    return float(match[1]) if match else 0.0
