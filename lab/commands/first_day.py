"""``python3 -m lab first-day``: what a machine with GPUs shows in its first minutes, step by step:
a line for each figure, with what it says.

A step that fails is named, and the next one goes on. Exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..first_day.place import Broken, Place, in_process
from ..first_day.steps import ON_ONE, ON_SEVERAL, Step

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

MARKS = {False: "ok  ", True: "FAIL"}


def run(steps: Mapping[int, Step], place: Place, say: Callable[[str], None]) -> list[str]:
    """Take the steps, by their numbers, one after another, each in a process of its own; return the
    names of those that failed.
    """
    failed = []
    for number, step in steps.items():
        say(f"{number}. {step.name}")
        try:
            bad = 0
            for line in in_process(partial(step.run, place), step.limit_s):
                say(f"   {MARKS[line.fails]} {line.figure}: {line.verdict}")
                bad += line.fails
        except Broken as error:
            bad = 1
            say(f"   {MARKS[True]} {error}")
        failed += [step.name] if bad else []
    return failed


def gpus_seen() -> int:
    """Count GPUs in another process: this one must have no context when others are forked off."""

    def seen():
        import torch

        yield torch.cuda.device_count()

    (count,) = in_process(seen, 60.0)
    return count


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab first-day",
        description="What a machine with GPUs shows in its first minutes; paste it into an issue.",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="of several: their steps; 1: those of one (default: all that are seen)",
    )
    parser.add_argument("--cuda-as", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the steps")
    parser.add_argument(
        "--step", type=int, action="append", help="of this number alone; several times for several"
    )
    parser.add_argument("--smallest", action="store_true", help="the first step, on the CPU")
    options = parser.parse_args(argv)
    if options.smallest:
        options.cuda_as, options.gpus, options.step = "cpu", 1, [1]
    seen = 1 if options.cuda_as == "cpu" else gpus_seen()
    if not seen:
        print("No GPU: torch sees none here; python3 -m launcher doctor says why.")
        return 1
    ranks = options.gpus or seen
    numbered = enumerate(ON_ONE if ranks == 1 else ON_SEVERAL, 1)
    steps = {number: step for number, step in numbered if not options.step or number in options.step}
    failed = run(
        steps, Place(options.cuda_as, ranks, host, options.cuda_as == "cpu"), partial(print, flush=True)
    )
    print(
        f"\n{len(steps) - len(failed)} steps as they should be"
        + f", not so: {', '.join(failed)}" * bool(failed)
    )
    return 1 if failed else 0
