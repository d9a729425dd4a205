"""Breaks the product in one line at a time, and says which faults its tests find.

Each row of ``lab/mutants.json`` is a fault that would pass in silence, and the tests that must find
it. Only those run, as many of their cases as run everywhere, and those that open a page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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
FINDERS = 3  # of a fault, at most, in the table
FAILED = re.compile(r"(?:FAILED|ERROR) (?P<file>[^:]+)::(?P<test>\w+)")
TOOK = re.compile(r"\s*(?P<seconds>[\d.]+)s \w+ +(?P<file>[^:]+)::(?P<test>\w+)")
TEST = re.compile(r"^def (test_\w+)", re.M)
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


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant: the tests that have failed, the cheapest first."""

    mutant: Mutant
    found: Found
    failed: Sequence[str]
    seconds: float


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

    def tried(self, mutant: Mutant, copy: Path, to_the_end: bool = False) -> Outcome:
        """Runs the tests of a copy of the checkout that has this fault, all of them or to the first
        that fails, and mends it again. Raises LaunchError if they cannot run.
        """
        file, began_s = copy / mutant.file, time.monotonic()
        whole, time_s = file.read_text(encoding="utf-8"), int(file.stat().st_mtime)
        file.write_text(mutant.broken(whole), encoding="utf-8")
        # Python takes a file to be the one that it compiled if second and size are the same
        os.utime(file, (time_s, time_s + next(self._writes)))
        failed: Sequence[str] = ()
        found: Found = "hangs"
        try:
            failed = self.failures(mutant.tests, copy, to_the_end, LIMIT_S)
            found = "found" if failed else "not found"
        except TimeoutError:
            pass
        finally:
            file.write_text(whole, encoding="utf-8")
            os.utime(file, (time_s, time_s))
        return Outcome(mutant, found, failed, time.monotonic() - began_s)

    def failures(
        self, tests: Sequence[str], copy: Path, to_the_end: bool, limit_s: float = WHOLE_S
    ) -> Sequence[str]:
        """Runs these tests in a copy of the checkout, all of them or to the first that fails.
        Returns those that fail, as rows name one, the cheapest first. Raises LaunchError if tests
        cannot run, and TimeoutError.
        """
        options = ["-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--browser"]
        options += ["--durations=0"] if to_the_end else ["-x"]
        places = dict.fromkeys("::".join(filter(None, place_of(test, copy))) for test in tests)
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
            return ()
        failed = {name_of(place) for place in filter(None, map(FAILED.match, lines))}
        if code != 1 or not failed:
            raise LaunchError(f"pytest could not run {' '.join(tests)}: {' '.join(lines[-5:])}")
        took_s: dict[str, float] = {}
        for line in filter(None, map(TOOK.match, lines)):
            took_s[name_of(line)] = took_s.get(name_of(line), 0.0) + float(line["seconds"])
        return sorted(failed, key=lambda name: (took_s.get(name, 0.0), name))

    def require_whole(self, tests: Sequence[str], copy: Path) -> None:
        """Raises LaunchError if a test fails without any fault: then it has found nothing."""
        if failed := self.failures(tests, copy, to_the_end=False):
            raise LaunchError(f"Without any fault {failed[0]} fails too: mend that first.")

    def all_tried(self, mutants: Sequence[Mutant], jobs: int, to_the_end: bool) -> Iterator[Outcome]:
        """Yields what came of each mutant, in the order given; after the last it raises LaunchError
        if a test that has found one fails without any fault too.
        """
        with tempfile.TemporaryDirectory(prefix="pipemesh-mutants-") as folder:
            copies: SimpleQueue[Path] = SimpleQueue()
            for number in range(jobs):
                copies.put(copied(Path(folder, f"copy{number}")))

            def one(mutant: Mutant) -> Outcome:
                copy = copies.get()
                try:
                    return self.tried(mutant, copy, to_the_end)
                finally:
                    copies.put(copy)

            found: set[str] = set()
            with ThreadPoolExecutor(jobs) as pool:
                for outcome in pool.map(one, mutants):
                    found.update(outcome.failed)
                    yield outcome
            if found:
                self.require_whole(sorted(found), copies.get())


def name_of(place: re.Match[str]) -> str:
    """Returns the name of a test as rows have it."""
    lab = "lab/" if place["file"].startswith("lab/") else ""
    return f"{lab}{Path(place['file']).stem}::{place['test']}"


def write_finders(outcomes: Sequence[Outcome]) -> None:
    """Writes into the table which tests find each fault, at most ``FINDERS``."""
    found = {key_of(one.mutant): one.failed[:FINDERS] for one in outcomes if one.failed}
    rows = (replace(one, tests=found.get(key_of(one), one.tests)) for one in read())
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    TABLE.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n", encoding="utf-8")


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.line, mutant.instead


def files_of(mutant: Mutant) -> set[str]:
    return {test.partition("::")[0] for test in mutant.tests}


def idle(outcomes: Sequence[Outcome], files: Sequence[str]) -> Iterator[str]:
    """Yields the tests in these files that find none of the faults."""
    finders = {test for one in outcomes for test in one.failed}
    for file in files:
        text = (ROOT / place_of(file, ROOT)[0]).read_text(encoding="utf-8")
        yield from (test for name in TEST.findall(text) if (test := f"{file}::{name}") not in finders)


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
    parser.add_argument(
        "--matrix",
        action="store_true",
        help=f"run all tests of the files that find a fault, write the {FINDERS} cheapest that do into the"
        " table, and print the tests that find none",
    )
    parser.add_argument("--smallest", action="store_true", help="one of them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at the same time (default 1)")
    options = parser.parse_args(argv)
    every = read()
    if unknown := {*(options.room or ())} - {one.room for one in every}:
        parser.error(f"no room is called {', '.join(sorted(unknown))}")
    chosen = [one for one in every if not options.room or one.room in options.room]
    if options.tests:
        if unknown := {*options.tests} - {file for one in chosen for file in files_of(one)}:
            parser.error(f"no row names {', '.join(sorted(unknown))}")
        chosen = [one for one in chosen if not files_of(one).isdisjoint(options.tests)]
    if why := lack():
        print(f"What only ComfyUI's page finds is left out: {why}")
        chosen = [one for one in chosen if not one.file.startswith("web/")]
    if options.smallest:
        chosen = sorted(chosen, key=lambda one: len(one.tests))[:1]
    if options.matrix:  # all tests of these files, whatever a row names of them
        chosen = [
            replace(one, tests=tuple({test.partition("::")[0] for test in one.tests})) for one in chosen
        ]
    outcomes: list[Outcome] = []
    with imported_at_hand(host, AT_HAND) as server:
        for one in Runs(server).all_tried(chosen, max(1, options.jobs), options.matrix):
            outcomes.append(one)
            by = f"  by {', '.join(one.failed)}" if options.matrix else ""
            print(
                f"{one.found:9}  {one.seconds:5.1f} s  {one.mutant.file}: {one.mutant.line.strip()}{by}",
                flush=True,
            )
    if options.matrix:
        write_finders(outcomes)
        files = options.tests or sorted({file for one in chosen for file in files_of(one)})
        print("\nThese find no fault of the table:", *idle(outcomes, files), sep="\n  ")
    print()
    of_rooms: dict[str, Counter[Found]] = {}
    for one in outcomes:
        of_rooms.setdefault(one.mutant.room, Counter())[one.found] += 1
    for room, counted in of_rooms.items():
        print(f"{room:10}  {counted.total() - counted['not found']} of {counted.total()} found")
    return 1 if any(counted["not found"] for counted in of_rooms.values()) else 0
