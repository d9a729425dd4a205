"""All tests in two lanes side by side, each a pytest of its own: those that share pools of real
ranks, and all others.

Standard library only. On two cores one lane alone leaves half of the machine idle.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

LANES = ("shared", "other")  # which tests are in which: tests/conftest.py
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


class Lane:
    """A pytest that runs, and its output: lines of progress go on at once, the others wait."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path):
        self.name = name
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        self._reader.join()
        return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if PROGRESS.search(self.lines[-1]):
                # One write: print() writes the end of the line by itself.
                sys.stdout.write(f"{self.name:7}{self.lines[-1]}\n")
                sys.stdout.flush()


def run(pytest: Sequence[str], options: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
    """Runs all tests by this command for pytest, and prints what each lane has said, then the
    slowest tests of both, where they are asked for. Returns 0 if all have passed.
    """
    # `--lane NAME` in two words: pytest looks for conftest.py in a folder NAME.
    lanes = [Lane(name, [*pytest, *options, f"--lane={name}"], env, folder) for name in LANES]
    codes = [lane.wait() for lane in lanes]
    for lane in lanes:
        print(f"== lane {lane.name}", *(line for line in lane.lines if not DURATION.match(line)), sep="\n")
    if timed := [line for lane in lanes for line in lane.lines if DURATION.match(line)]:
        timed.sort(key=seconds, reverse=True)
        print("== the slowest tests of both lanes", *timed[:SLOWEST], sep="\n", flush=True)
    return next(filter(None, codes), 0)


def seconds(line: str) -> float:
    match = DURATION.match(line)
    return float(match[1]) if match else 0.0
