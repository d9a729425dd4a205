"""Breaks the product in one line at a time, and says which faults its tests find.

Each row of ``lab/mutants.json`` is a fault that would pass in silence, and the tests that must find
it. Only those run, as many of their cases as run everywhere, and those that open a page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from ...launcher.checkout import ROOT
from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ..comfyui.page import lack

TABLE = ROOT / "lab" / "mutants.json"
LIMIT_S = 300.0  # of one mutant's tests: a fault may make ranks hang
Found = Literal["found", "hangs", "not found"]


@dataclass(frozen=True)
class Mutant:
    """``instead`` stands where ``line`` stands in ``file``; some of ``tests`` must fail: a file of
    ``tests/`` (``test_wire``), one of the laboratory's (``lab/test_parity``), or with ``::`` and a
    name one test of it.
    """

    room: str
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]

    def broken(self, text: str) -> str:
        """Returns the file's text with the fault. Raises LaunchError if the line is not there
        exactly once.
        """
        if text.count(self.line) != 1:
            raise LaunchError(
                f"{self.file} has {self.line.strip()!r} {text.count(self.line)} times: mend lab/mutants.json."
            )
        return text.replace(self.line, self.instead)


def read() -> list[Mutant]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copied(folder: Path) -> Path:
    """Copies what git tracks of the checkout, and what is new in it; the copy is a checkout too."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")):
        source, target = ROOT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def place_of(test: str, root: Path) -> tuple[str, str]:
    """Returns the file of a test that a row names, from the root of a checkout, and the one test in
    it that is meant; empty if all are.
    """
    name, _, one = test.partition("::")
    folder = root / ("lab/tests" if name.startswith("lab/") else "tests")
    file = f"{name.removeprefix('lab/')}.py"
    return str(next(folder.rglob(file), folder / file).relative_to(root)), one


def tried(mutant: Mutant, copy: Path) -> Found:
    """Runs the tests of a copy of the checkout that has this fault, and mends it again. Raises
    LaunchError if they cannot run.
    """
    file = copy / mutant.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(mutant.broken(whole), encoding="utf-8")
    try:
        return "found" if first_failure(mutant.tests, copy, LIMIT_S) else "not found"
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        file.write_text(whole, encoding="utf-8")


def first_failure(tests: Sequence[str], copy: Path, limit_s: float | None = None) -> str:
    """Runs these tests in a copy of the checkout; returns the first test that fails, empty where
    all pass. Raises LaunchError if tests cannot run, and subprocess.TimeoutExpired.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--browser", *("::".join(filter(None, place_of(test, copy))) for test in tests)],
        cwd=copy,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    if done.returncode != 1 or not failed:
        raise LaunchError(f"pytest could not run {' '.join(tests)}: {' '.join([*lines, done.stderr][-5:])}")
    return failed[0]


def require_whole(mutants: Sequence[Mutant], copies: Sequence[Path]) -> None:
    """Raises LaunchError if a test fails without any fault: then it finds nothing."""
    names = sorted({name for one in mutants for name in one.tests})
    shares = [share for number in range(len(copies)) if (share := names[number :: len(copies)])]
    with ThreadPoolExecutor(len(copies)) as pool:
        for failure in filter(None, pool.map(first_failure, shares, copies)):
            raise LaunchError(f"Without any fault, {failure}: mend that first.")


def all_tried(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, Found, float]]:
    """Yields each mutant, in the order given, with what came of it and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="pipemesh-mutants-") as folder:
        every = [copied(Path(folder, f"copy{number}")) for number in range(jobs)]
        require_whole(mutants, every)
        copies: SimpleQueue[Path] = SimpleQueue()
        for one_copy in every:
            copies.put(one_copy)

        def one(mutant: Mutant) -> tuple[Mutant, Found, float]:
            copy, began = copies.get(), time.monotonic()
            try:
                return mutant, tried(mutant, copy), time.monotonic() - began
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, mutants)


def main(argv: Sequence[str], _host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab mutants", description=__doc__)
    parser.add_argument(
        "--room", action="append", metavar="ROOM", help="only these; several times for several"
    )
    parser.add_argument("--smallest", action="store_true", help="one of them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at the same time (default 1)")
    options = parser.parse_args(argv)
    every = read()
    if unknown := {*(options.room or ())} - {one.room for one in every}:
        parser.error(f"no room is called {', '.join(sorted(unknown))}")
    chosen = [one for one in every if not options.room or one.room in options.room]
    if why := lack():
        print(f"What only ComfyUI's page finds is left out: {why}")
        chosen = [one for one in chosen if not one.file.startswith("web/")]
    if options.smallest:
        chosen = sorted(chosen, key=lambda one: len(one.tests))[:1]
    of_rooms: dict[str, Counter[Found]] = {}
    for mutant, found, seconds in all_tried(chosen, max(1, options.jobs)):
        of_rooms.setdefault(mutant.room, Counter())[found] += 1
        print(f"{found:9}  {seconds:5.1f} s  {mutant.file}: {mutant.line.strip()}", flush=True)
    print()
    for room, counted in of_rooms.items():
        print(f"{room:10}  {counted.total() - counted['not found']} of {counted.total()} found")
    return 1 if any(counted["not found"] for counted in of_rooms.values()) else 0
