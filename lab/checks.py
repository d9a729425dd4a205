"""The tests of a folder, or all that a merge needs, in ComfyUI's python. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.checkout import ROOT
from launcher.comfyui.search import ensure_comfyui, missing_modules
from launcher.command_line import replace_process
from launcher.errors import LaunchError

from . import lanes
from .forks import forking, in_a_fork

# Of the process that tests and ranks of theirs are forked from: to import it takes six seconds
AT_HAND = "pipemesh.tests.comfyui_at_hand"


def run_tests(folder: str, rest: Sequence[str]) -> int:
    """Runs the tests in a folder of the checkout, all of them as three processes side by side."""
    python, env = prepared_for_tests()
    options = ["-o", f"testpaths={folder}", *rest]
    if not lanes.is_of_all(rest):
        replace_process([python, "-m", "pytest", *options], env)
    with forking(python, env, AT_HAND) as control, TemporaryDirectory(prefix="pipemesh-tests-") as taken:
        shares = lanes.in_turns("tests", forked_pytest(control, options), Path(taken, "tests"))
        return lanes.run(shares, env, ROOT, [control])


def run_checks(rest: Sequence[str]) -> int:
    """Runs lint, format, types, and all tests of the product and of the laboratory."""
    python, env = prepared_for_tests()
    with forking(python, env, AT_HAND) as control, TemporaryDirectory(prefix="pipemesh-tests-") as taken:
        product, laboratory = (
            forked_pytest(control, ["-o", f"testpaths={folder}", *rest]) for folder in ("tests", "lab/tests")
        )
        checks = {
            "ruff": [python, "-m", "ruff", "check", "."],
            "format": [python, "-m", "ruff", "format", "--check", "."],
            "types": [python, "-m", "basedpyright", "--pythonpath", python],
            "laboratory": laboratory,  # before the last of those that share out what is left
            **lanes.in_turns("tests", product, Path(taken, "tests")),
        }
        return lanes.run(checks, env, ROOT, [control])


def forked_pytest(control: int, options: Sequence[str]) -> list[str]:
    return in_a_fork(control, ROOT / "lab" / "forked_pytest.py", "{fd}", *options)


def prepared_for_tests() -> tuple[str, dict[str, str]]:
    """Returns ComfyUI's python, and the environment in which it runs tests. Raises LaunchError
    if there is no ComfyUI, or no pytest in its python.
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
