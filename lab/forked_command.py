"""Run a command of ``python3 -m lab`` in a fork that has ComfyUI imported:
``forked_command.py PARENT_PID FD COMMAND OPTION...``. Those that start processes get the server
that this one was forked from, which is asked over FD.
"""

import importlib
import os
import sys
from pathlib import Path

STARTING = ("bench", "parity")


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(root)  # as `python3 -m lab` has it
    from lab.__main__ import INSIDE
    from pool.package import register_package

    register_package(root)
    parent, control, command, *options = sys.argv[1:]
    from pipemesh.lab.bench.forked import above
    from pipemesh.launcher.comfyui.host_record import ComfyInstall
    from pipemesh.pool.worker_main import die_with_parent

    die_with_parent(int(parent))
    host = ComfyInstall.from_json(os.environ["PIPEMESH_HOST"])
    sys.path[0] = host.comfyui
    given = (above(int(control)),) if command in STARTING else ()
    sys.exit(importlib.import_module(f"pipemesh.{INSIDE[command]}").main(options, host, *given))


if __name__ == "__main__":
    main()
