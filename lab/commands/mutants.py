"""Breaks the product in one line at a time, and says which faults its tests find.

Each row of ``lab/mutants.json`` is a fault that would pass in silence, and the tests that must find
it. Only those run, as many of their cases as run everywhere, and those that open a page.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Literal

from ...launcher.checkout import ROOT
from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ...pool.fork_server import ServerProcess
from ...pool.supervisor import Command, Process
from ..bench.forked import imported_at_hand
from ..comfyui.page import lack

TABLE = ROOT / "lab" / "mutants.json"
SCRIPT = str(ROOT / "lab" / "forked_tests.py")
AT_HAND = "pipemesh.lab.libraries_at_hand"
LIMIT_S = 300.0  # of one mutant's tests: a fault may make ranks hang
WHOLE_S = 3600.0  # of all of them, without a fault
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


def said_by(process: Process, limit_s: float) -> str:
    """Returns its output, once it has ended. Raises TimeoutError."""
    said, ends_s = b"", time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        if select.select([process.stdout], [], [], 0.2)[0]:
            if not (more := process.stdout.read(1 << 16)):
                break
            said += more
        elif process.poll() is not None:  # one that it has started may hold its output open
            break
    else:
        raise TimeoutError
    return said.decode(errors="replace")


class Runs:
    """Runs tests of copies of the checkout, each run in a fork of ``server``, which has imported
    ComfyUI (``libraries_at_hand.py``): to import it takes longer than most tests. Any thread may
    ask.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._lock = Lock()
        self._writes = count(1)

    def tried(self, mutant: Mutant, copy: Path) -> Found:
        """Runs the tests of a copy of the checkout that has this fault, and mends it again. Raises
        LaunchError if they cannot run.
        """
        file = copy / mutant.file
        whole, time_s = file.read_text(encoding="utf-8"), int(file.stat().st_mtime)
        file.write_text(mutant.broken(whole), encoding="utf-8")
        # Python takes a file to be the one that it compiled if second and size are the same
        os.utime(file, (time_s, time_s + next(self._writes)))
        try:
            return "found" if self.first_failure(mutant.tests, copy, LIMIT_S) else "not found"
        except TimeoutError:
            return "hangs"
        finally:
            file.write_text(whole, encoding="utf-8")
            os.utime(file, (time_s, time_s))

    def first_failure(self, tests: Sequence[str], copy: Path, limit_s: float = WHOLE_S) -> str:
        """Runs these tests in a copy of the checkout. Returns the first test that fails, empty if
        all pass. Raises LaunchError if tests cannot run, and TimeoutError.
        """
        options = ["-q", "-x", "--no-header", "-rfE", "-p", "no:cacheprovider", "--browser"]
        places = ("::".join(filter(None, place_of(test, copy))) for test in tests)
        argv = (sys.executable, SCRIPT, "{parent}", "{fd}", str(copy), *options, *places)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._lock:
            process = self._server.fork(Command(argv, env, self._server.control.fileno()))
        try:
            lines = said_by(process, limit_s).splitlines()
        except TimeoutError:
            process.kill()
            raise
        finally:
            code = process.wait()
        if code == 0:
            return ""
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
        if code != 1 or not failed:
            raise LaunchError(f"pytest could not run {' '.join(tests)}: {' '.join(lines[-5:])}")
        return failed[0]

    def require_whole(self, mutants: Sequence[Mutant], copies: Sequence[Path]) -> None:
        """Raises LaunchError if a test fails without any fault: then it finds nothing."""
        names = sorted({name for one in mutants for name in one.tests})
        shares = [share for number in range(len(copies)) if (share := names[number :: len(copies)])]
        with ThreadPoolExecutor(len(copies)) as pool:
            for failure in filter(None, pool.map(self.first_failure, shares, copies)):
                raise LaunchError(f"Without any fault, {failure}: mend that first.")

    def all_tried(self, mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, Found, float]]:
        """Yields each mutant, in the order given, with what came of it and the seconds it took."""
        with tempfile.TemporaryDirectory(prefix="pipemesh-mutants-") as folder:
            every = [copied(Path(folder, f"copy{number}")) for number in range(jobs)]
            self.require_whole(mutants, every)
            copies: SimpleQueue[Path] = SimpleQueue()
            for one_copy in every:
                copies.put(one_copy)

            def one(mutant: Mutant) -> tuple[Mutant, Found, float]:
                copy, began = copies.get(), time.monotonic()
                try:
                    return mutant, self.tried(mutant, copy), time.monotonic() - began
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(jobs) as pool:
                yield from pool.map(one, mutants)


def main(argv: Sequence[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab mutants", description=__doc__)
    parser.add_argument(
        "--room", action="append", metavar="ROOM", help="only these; several times for several"
    )
    parser.add_argument(
        "--tests",
        type=lambda names: names.split(","),
        help="only what these files find: test_wire,lab/test_host",
    )
    parser.add_argument("--smallest", action="store_true", help="one of them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at the same time (default 1)")
    options = parser.parse_args(argv)
    every = read()
    if unknown := {*(options.room or ())} - {one.room for one in every}:
        parser.error(f"no room is called {', '.join(sorted(unknown))}")
    chosen = [one for one in every if not options.room or one.room in options.room]
    if options.tests:
        named = {one: {test.partition("::")[0] for test in one.tests} for one in chosen}
        if unknown := {*options.tests} - set().union(*named.values()):
            parser.error(f"no row names {', '.join(sorted(unknown))}")
        chosen = [one for one in chosen if not named[one].isdisjoint(options.tests)]
    if why := lack():
        print(f"What only ComfyUI's page finds is left out: {why}")
        chosen = [one for one in chosen if not one.file.startswith("web/")]
    if options.smallest:
        chosen = sorted(chosen, key=lambda one: len(one.tests))[:1]
    of_rooms: dict[str, Counter[Found]] = {}
    with imported_at_hand(host, AT_HAND) as server:
        for mutant, found, seconds in Runs(server).all_tried(chosen, max(1, options.jobs)):
            of_rooms.setdefault(mutant.room, Counter())[found] += 1
            print(f"{found:9}  {seconds:5.1f} s  {mutant.file}: {mutant.line.strip()}", flush=True)
    print()
    for room, counted in of_rooms.items():
        print(f"{room:10}  {counted.total() - counted['not found']} of {counted.total()} found")
    return 1 if any(counted["not found"] for counted in of_rooms.values()) else 0
