"""The command line: `python3 -m lab COMMAND`, from the root of a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.command_line import exit_with, run_in_host

from .checks import run_checks, run_tests

USAGE = """\
python3 -m lab COMMAND [options]

  bench       the measurements
  parity      parity with stock ComfyUI
  families    which model families run in parallel, how, and why others do not
  vaes        which VAEs a pool computes, and how exactly
  templates   ComfyUI's workflow templates, by stock and through a pool
  train       the small model of the demo, from its first picture
  host-diff   what another ComfyUI changes for each family of models
  fingerprints  what this ComfyUI is, into the table of those that were tested
  mutants     which faults of one line the product's tests find
  dryrun      what each rank would compute, hold and send, on GPUs that are not there
  first-day   what a machine with GPUs shows in its first minutes, step by step
  test        the laboratory's own tests (options go to pytest)
  check       lint, format, types, all tests: what .ci/run runs (options go to pytest)
"""
INSIDE = {  # command -> the module whose main(argv, host) it is
    "bench": "lab.bench.command",
    "parity": "lab.commands.parity",
    "families": "lab.commands.families",
    "vaes": "lab.commands.vaes",
    "templates": "lab.commands.templates",
    "dryrun": "lab.commands.dryrun",
    "mutants": "lab.commands.mutants",
    "train": "lab.commands.train",
    "fingerprints": "lab.commands.fingerprints",
    "host-diff": "lab.commands.host_diff",
    "first-day": "lab.commands.first_day",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    command, *rest = argv
    if command == "test":
        return run_tests("lab/tests", rest)
    if command == "check":
        return run_checks(rest)
    if command not in INSIDE:
        print(f"There is no command `{command}`.\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    return run_in_host("lab", command, INSIDE[command], rest)


if __name__ == "__main__":
    exit_with(main)
