"""How `python3 -m launcher COMMAND` and `python3 -m lab COMMAND` run a command: in ComfyUI's
python, which is found or installed first, with PIPEMESH_HOST set.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .checkout import ROOT
from .errors import LaunchError


def run_in_host(package: str, command: str, module: str, rest: Sequence[str]) -> int:
    """Runs `main(rest, host)` of a module of the pack, such as `launcher.commands.doctor`, as
    `python3 -m PACKAGE COMMAND` in ComfyUI's python. Raises LaunchError if there is no ComfyUI.
    """
    require_part_of_a_checkout(command, Path(*module.split(".")).with_suffix(".py"))
    if record := os.environ.get("PIPEMESH_HOST"):
        return run_inside(module, rest, record)
    from .comfyui.search import ensure_comfyui

    host = ensure_comfyui()
    env = {**os.environ, "PIPEMESH_HOST": host.to_json()}
    return replace_process([host.python, "-m", package, command, *rest], env)


def require_part_of_a_checkout(command: str, part: Path) -> None:
    """Raises LaunchError if the published pack leaves out a part that the command needs."""
    if not (ROOT / part).exists():
        raise LaunchError(
            f"`{command}` needs {part.parts[0]}/, which the published pack leaves out: clone PipeMesh's"
            " repository and run it there."
        )


def replace_process(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `command`, run from the root of the checkout."""
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(command[0], command, env)


def run_inside(module: str, rest: Sequence[str], record: str) -> int:
    """Runs the command in this process, which is ComfyUI's python. The pack is `pipemesh`, and
    ComfyUI's modules come first on the path: its `nodes` is not ours.
    """
    host_record = import_of_pack("launcher.comfyui.host_record")
    launch_errors = import_of_pack("launcher.errors")
    errors = import_of_pack("parallel_runtime.errors")
    host = host_record.ComfyInstall.from_json(record)
    sys.path[:] = [host.comfyui, *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    try:
        return import_of_pack(module).main(list(rest), host)
    except (errors.PipeMeshError, launch_errors.LaunchError) as error:
        print(f"pipemesh: {error}", file=sys.stderr)
        return 1


def import_of_pack(module: str) -> ModuleType:
    """Imports a module of the pack, such as `launcher.commands.node`, as one of `pipemesh`."""
    runpy.run_path(str(ROOT / "pool" / "package.py"))["register_package"](ROOT)
    return importlib.import_module(f"pipemesh.{module}")


def exit_with(main: Callable[[Sequence[str]], int]) -> None:
    """Calls `main` with this process's arguments and exits with its result; prints an error for
    users as one sentence, without a traceback.
    """
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(
            f"pipemesh: Python 3.10 or newer is needed, this is {sys.version.split()[0]}: run it with a newer"
            " python3."
        )
    if sys.platform != "linux":
        sys.exit(f"pipemesh: PipeMesh runs on Linux, and this is {sys.platform}: run the command on Linux.")
    try:
        sys.exit(main(sys.argv[1:]))
    except LaunchError as error:
        print(f"pipemesh: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\npipemesh: stopped; run the same command again to go on.", file=sys.stderr)
        sys.exit(130)
