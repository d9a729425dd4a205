"""The tests of a folder, or all that a merge needs, in ComfyUI's python. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.checkout import ROOT
from launcher.comfyui.find import ensure_comfyui, missing_modules
from launcher.command_line import replace_process
from launcher.errors import LaunchError

from . import lanes


def run_tests(folder: str, rest: Sequence[str]) -> int:
    """Runs the tests in a folder of the checkout, all of them as three processes side by side."""
    python, env = prepared_for_tests()
    pytest = pytest_of(python, folder, rest)
    if not lanes.is_of_all(rest):
        replace_process(pytest, env)
    with TemporaryDirectory(prefix="pipemesh-tests-") as taken:
        return lanes.run(lanes.in_turns("tests", pytest, Path(taken, "tests")), env, ROOT)


def run_checks(rest: Sequence[str]) -> int:
    """Runs lint, format, types, and all tests of the product and of the laboratory."""
    python, env = prepared_for_tests()
    product, laboratory = (pytest_of(python, folder, rest) for folder in ("tests", "lab/tests"))
    with TemporaryDirectory(prefix="pipemesh-tests-") as taken:
        checks = {
            "ruff": [python, "-m", "ruff", "check", "."],
            "format": [python, "-m", "ruff", "format", "--check", "."],
            "types": [python, "-m", "basedpyright", "--pythonpath", python],
            "laboratory": laboratory,  # before the last of those that share out what is left
            **lanes.in_turns("tests", product, Path(taken, "tests")),
        }
        return lanes.run(checks, env, ROOT)


def pytest_of(python: str, folder: str, rest: Sequence[str]) -> list[str]:
    return [python, "-m", "pytest", "-o", f"testpaths={folder}", *rest]


def prepared_for_tests() -> tuple[str, dict[str, str]]:
    """Returns ComfyUI's python, and the environment in which it runs tests. Raises LaunchError
    where there is no ComfyUI, or no pytest in its python.
    """
    host = ensure_comfyui()
    lacking = missing_modules(host.python, ("pytest", "hypothesis"))
    if lacking:
        raise LaunchError(
            f"{host.python} has no {' and no '.join(lacking)}: run {host.python} -m pip install"
            f" {' '.join(lacking)}"
        )
    env = {**os.environ, "PIPEMESH_HOST": host.to_json(), "OMP_NUM_THREADS": "1"}
    # Tests start hundreds of processes, and each would compile the pack anew
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return host.python, env
