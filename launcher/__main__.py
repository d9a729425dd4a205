"""The command line: `python3 -m launcher COMMAND`, from the root of a checkout or of an installed
pack.

`host` and `test` need the standard library only. Every other command runs in ComfyUI's python.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .checkout import ROOT
from .command_line import exit_with, import_of_pack, require_part_of_a_checkout, run_in_host

USAGE = """\
python3 -m launcher COMMAND [options]

  host        find or install the ComfyUI that the other commands run on
  doctor      what works on this machine, what does not, and the remedy
  demo        a stock workflow on one process and on two, side by side
  test        the tests (options go to pytest)
  plan        which layout is the fastest for a job on given GPUs, and why the others lose
  node        lends this machine to a ComfyUI on another; torchrun starts it (MULTI_NODE.md of the repository)

In a clone, python3 -m lab has the measurements, the parity runs and the rest of the laboratory.

PIPEMESH_COMFYUI names a ComfyUI of your own (its folder; in a clone of the repository also a tar
archive of it, which is installed beside the first one), PIPEMESH_PYTHON its python, PIPEMESH_CACHE
the folder for those installed here. `host`, `demo`, `test` and `plan` need a clone.
"""
INSIDE = {  # command -> the module whose main(argv, host) it is
    "doctor": "launcher.commands.doctor",
    "demo": "lab.commands.demo",
    "plan": "lab.commands.plan",
    "node": "launcher.commands.node",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    command, *rest = argv
    if command == "host":
        require_part_of_a_checkout("host", Path("lab/host.py"))
        return importlib.import_module("lab.host").main(rest)
    if command == "test":
        require_part_of_a_checkout("test", Path("tests"))
        return importlib.import_module("lab.checks").run_tests("tests", rest)
    if command not in INSIDE:
        print(f"There is no command `{command}`.\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    if command == "doctor" and not os.environ.get("PIPEMESH_HOST"):
        from .comfyui.search import is_installed

        if not is_installed(ROOT, os.environ):  # to ask what works here must not cost 6 GB
            return import_of_pack(INSIDE[command]).main(rest, None)
    return run_in_host("launcher", command, INSIDE[command], rest)


if __name__ == "__main__":
    exit_with(main)
