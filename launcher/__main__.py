"""The command line: `python3 -m launcher COMMAND`, from the root of a checkout.

`host` needs the standard library only. Every other command runs in ComfyUI's python: this process
finds or installs ComfyUI, the host, and starts itself again there, with PIPEMESH_HOST set.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USAGE = """\
python3 -m launcher COMMAND [options]

  host        find or install the ComfyUI that the other commands run on
  doctor      what works on this machine, what does not, and the remedy
  demo        a stock workflow on one process and on two, side by side
  test        the tests (options go to pytest)
  bench       the measurements
  parity      parity with stock ComfyUI
  families    which model families run in parallel, how, and why others do not
  templates   ComfyUI's workflow templates, by stock and through a pool
  train       the small model of the demo, from its first picture
  redundancy  how much a model's blocks change from one evaluation to the next
  dryrun      what each rank would compute, hold and send, on GPUs that are not there
  plan        which layout is the fastest for a job on given GPUs, and why the others lose
  node        lends this machine to a ComfyUI on another; torchrun starts it (docs/MULTI_NODE.md)

PIPEMESH_COMFYUI names a ComfyUI of your own (its folder, or a tar archive of it, which is
installed beside the first one), PIPEMESH_PYTHON its python, PIPEMESH_CACHE the folder for those installed here.
"""
ROOT = Path(__file__).resolve().parent.parent
INSIDE = {  # command -> the module whose main(argv, host) it is
    "doctor": "launcher.commands.doctor",
    "demo": "launcher.commands.demo",
    "bench": "benchmarks.command",
    "parity": "launcher.commands.parity",
    "families": "launcher.commands.families",
    "templates": "launcher.commands.templates",
    "dryrun": "launcher.commands.dryrun",
    "plan": "launcher.commands.plan",
    "train": "launcher.commands.train",
    "redundancy": "launcher.commands.redundancy",
    "node": "launcher.commands.node",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    command, *rest = argv
    if command == "host":
        from .comfyui.find import main as host_main

        return host_main(rest)
    if command not in (*INSIDE, "test"):
        print(f"There is no command `{command}`.\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    if command in INSIDE and os.environ.get("PIPEMESH_HOST"):
        return run_inside(command, rest, os.environ["PIPEMESH_HOST"])
    if command == "doctor" and (status := look_before_installing(rest)) is not None:
        return status
    return start_in_host(command, rest)


def look_before_installing(rest: Sequence[str]) -> int | None:
    """Prints what can be said without a ComfyUI, where there is none yet; else None. To ask what
    works here must not cost 6 GB.
    """
    from .comfyui.find import is_installed

    if is_installed(ROOT, os.environ):
        return None
    from .commands.doctor import main as doctor_main

    return doctor_main(rest, None)


def start_in_host(command: str, rest: Sequence[str]) -> int:
    """Starts the command again in ComfyUI's python. Raises LaunchError where there is none."""
    from . import lanes
    from .comfyui.find import ensure_comfyui, missing_modules
    from .comfyui.install import LaunchError

    host = ensure_comfyui()
    env = {**os.environ, "PIPEMESH_HOST": host.to_json()}
    if command != "test":
        return replace_process([host.python, "-m", "launcher", command, *rest], env)
    lacking = missing_modules(host.python, ("pytest", "hypothesis"))
    if lacking:
        raise LaunchError(
            f"{host.python} has no {' and no '.join(lacking)}: run {host.python} -m pip install"
            f" {' '.join(lacking)}"
        )
    pytest, env = [host.python, "-m", "pytest"], {**env, "OMP_NUM_THREADS": "1"}
    return (
        lanes.run(pytest, rest, env, ROOT)
        if lanes.is_of_all(rest)
        else replace_process([*pytest, *rest], env)
    )


def replace_process(command: list[str], env: Mapping[str, str]) -> int:
    """Goes on as `command`, from the root of the checkout."""
    os.chdir(ROOT)
    if os.name == "nt":  # there execve would let the shell's prompt come back before the command has ended
        return subprocess.run(command, env=env, check=False).returncode
    sys.stdout.flush()
    os.execve(command[0], command, env)


def run_inside(command: str, rest: Sequence[str], record: str) -> int:
    """Runs the command in this process, which is ComfyUI's python. The pack is `pipemesh`, and
    ComfyUI's modules come first on the path: its `nodes` is not ours.
    """
    from .package import register_package

    register_package(ROOT)
    host_module = importlib.import_module("pipemesh.launcher.comfyui.find")
    errors = importlib.import_module("pipemesh.parallel_runtime.errors")
    host = host_module.ComfyInstall.from_json(record)
    sys.path[:] = [host.comfyui, *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    try:
        return importlib.import_module(f"pipemesh.{INSIDE[command]}").main(list(rest), host)
    except (errors.PipeMeshError, host_module.LaunchError) as error:
        print(f"pipemesh: {error}", file=sys.stderr)
        return 1


def guarded_main(argv: Sequence[str]) -> int:
    """Runs `main`; prints an error for users as one sentence, without a traceback."""
    from .comfyui.install import LaunchError

    try:
        return main(argv)
    except LaunchError as error:
        print(f"pipemesh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npipemesh: stopped; run the same command again to go on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(
            f"pipemesh: Python 3.10 or newer is needed, this is {sys.version.split()[0]}: run it with a newer"
            " python3."
        )
    sys.exit(guarded_main(sys.argv[1:]))
