"""The tests of a folder, or all that a merge needs, in ComfyUI's python. Standard library only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from launcher.checkout import ROOT
from launcher.comfyui.search import ensure_comfyui, missing_modules
from launcher.command_line import replace_process
from launcher.errors import LaunchError
from pool.worker_main import die_with_parent

from .forks import comfyui_shared
from .host import add_test_tools

TOOLS = {  # a module that tests need -> its package
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
}
WORKERS = 3  # in all, on two cores: tests wait for processes that start, hang or are lost
# Else pytest-xdist 3.8 starts another worker, and may wait for ever where workers take whole files
A_LOSS_ENDS_THE_RUN = "--max-worker-restart=0"
# Options of a run of all tests. Any other may choose some of them, or do something else
ALL = re.compile(r"-[qvxsl]+|-r\w+|--(durations|durations-min|tb|color|maxfail)=\S+")
PROGRESS = re.compile(r"\[ *\d+%\]$")


def run_tests(folder: str, rest: Sequence[str]) -> int:
    """Runs the tests in a folder of the checkout: all of them by workers side by side, those that
    options choose by one process.
    """
    python, env = prepared_for_tests()
    if not all(ALL.fullmatch(option) for option in rest):
        replace_process([*pytest_of(python, folder), *rest], env)
    with comfyui_shared(python, env) as shared:
        command = [*pytest_of(python, folder), *workers(WORKERS, shared), *rest]
        dies = partial(die_with_parent, os.getpid())
        return subprocess.run(command, env=env, cwd=ROOT, check=False, preexec_fn=dies).returncode


def run_checks(rest: Sequence[str]) -> int:
    """Runs lint, format, types, and all tests of the product and of the laboratory."""
    python, env = prepared_for_tests()
    with comfyui_shared(python, env) as shared:
        checks = {
            "ruff": [python, "-m", "ruff", "check", "."],
            "format": [python, "-m", "ruff", "format", "--check", "."],
            "types": [python, "-m", "basedpyright", "--pythonpath", python],
            "tests": [*pytest_of(python, "tests lab/tests"), *workers(WORKERS, shared), *rest],
        }
        return run_side_by_side(checks, env)


def pytest_of(python: str, folders: str) -> list[str]:
    return [python, "-m", "pytest", "-o", f"testpaths={folders}"]


def workers(count: int, shared: str) -> list[str]:
    return [f"-n{count}", A_LOSS_ENDS_THE_RUN, "-p", "lab.lost_workers", f"--forked-from={shared}"]


def prepared_for_tests() -> tuple[str, dict[str, str]]:
    """Returns ComfyUI's python, and the environment in which it runs tests. Raises LaunchError
    if there is no ComfyUI, or a user's own python lacks what tests need.
    """
    host = ensure_comfyui()
    lacking = missing_modules(host.python, tuple(TOOLS))
    if lacking and host.base:
        add_test_tools(host, ROOT)
    elif lacking:
        packages = [TOOLS[module] for module in lacking]
        raise LaunchError(
            f"{host.python} has no {' and no '.join(packages)}: run {host.python} -m pip install"
            f" {' '.join(packages)}"
        )
    env = {**os.environ, "PIPEMESH_HOST": host.to_json(), "OMP_NUM_THREADS": "1"}
    # Tests start hundreds of processes, and each would compile the pack anew
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return host.python, env


@dataclass(frozen=True)
class Done:
    name: str
    code: int
    lines: Sequence[str]


def run_side_by_side(checks: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> int:
    """Runs commands by their names. Prints lines of progress at once, then what each has said, and
    last what has failed. Returns 0 if all have passed.
    """

    def run_one(name: str) -> Done:
        lines = []
        with subprocess.Popen(
            checks[name],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=partial(die_with_parent, os.getpid()),
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if PROGRESS.search(lines[-1]):
                    say(name, lines[-1])
        say(name, lines[-1] if lines else "has ended")
        return Done(name, process.returncode, [line for line in lines if not PROGRESS.search(line)])

    with ThreadPoolExecutor(len(checks)) as threads:
        every = sorted(threads.map(run_one, checks), key=lambda one: one.code != 0)
    for done in every:
        print(f"== {done.name}", *done.lines, sep="\n")
    failed = [done for done in every if done.code]
    if failed:
        print("== failed:", ", ".join(done.name for done in failed), flush=True)
    return next((done.code for done in failed), 0)


def say(name: str, line: str) -> None:
    # One write: print() writes the end of the line by itself.
    sys.stdout.write(f"{name:13}{line}\n")
    sys.stdout.flush()
