"""``python3 -m lab bench NAME...``: measure on this machine how much PipeMesh gains and costs,
as ratios taken in one run.

A bench is a name here, and a module in ``lab/bench/`` or one of several in one. Exits with 1 if a
goal fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .figures import Figure, Options, number

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall
    from ...pool.fork_server import ServerProcess

NAMES = (
    "capacity",
    "hop",
    "exchange",
    "sp",
    "cfg",
    "data",
    "windows",
    "queue",
    "vae",
    "run",
    "prompts",
    "mixed",
    "load",
    "peers",
    "pipefusion",
    "compile",
    "quality",
    "distribution",
    "plan",
    "machines",
    "against",
    "trial",
)
OF_GROUPS = ("cfg", "data", "windows")  # benches of that module
MIN_ROUNDS = 25
ROW = "{:9}{:24}{:16}{:>12}  {:26}{:7}{:24}{}"


def table_row(figure: Figure) -> str:
    value, low, high = map(number, figure.estimate)
    goal = str(figure.goal) if figure.goal else ""
    verdict = "" if not goal else "ok" if figure.is_met else "MISS"
    interval = "" if low == high else f"{low} .. {high}"
    return ROW.format(
        figure.bench, figure.case, figure.metric, value, interval, figure.unit, goal, verdict
    ).rstrip()


def main(argv: list[str], host: ComfyInstall, server: ServerProcess | None = None) -> int:
    """``server``: the smallest cases' processes are forked from it."""
    parser = argparse.ArgumentParser(
        prog="python3 -m lab bench",
        description="Measure how much PipeMesh gains and costs on this machine, as ratios taken in one run.",
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"rounds behind each ratio (default {MIN_ROUNDS}; fewer only to try)",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="the smallest case of each, in one round: its figures come, and say nothing",
    )
    drawn = (
        "of pipefusion, when each stage was at work; of quality and distribution, samples, which another run"
        " takes again"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=f"write pictures there: {drawn}")
    parser.add_argument(
        "--prompts", type=int, help="captions that quality (64) and distribution (1000) sample"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=(),
        metavar="WORD",
        help="cells of quality with these words: patches=4 steps=28 euler; or cases of other benches",
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, for against")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = 1 if options.smallest else MIN_ROUNDS
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: choose 1 or more")
    if options.prompts is not None and options.prompts < 2:
        parser.error(f"--prompts {options.prompts}: choose 2 or more")
    if options.pictures:
        options.pictures = options.pictures.absolute()
        options.pictures.mkdir(parents=True, exist_ok=True)

    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if not options.json:
        print(
            ROW.format("bench", "case", "metric", "value", "90 % interval", "unit", "goal", "").rstrip(),
            flush=True,
        )
    missed = 0
    for name in dict.fromkeys(options.names):
        module = importlib.import_module(f".{'groups' if name in OF_GROUPS else name}", __package__)
        figures = module.bench(
            Options(
                host=host,
                name=name,
                rounds=options.rounds,
                pictures=options.pictures,
                prompts=options.prompts,
                only=tuple(options.only),
                against=options.against,
                smallest=options.smallest,
                server=server,
            )
        )
        while True:
            with contextlib.redirect_stdout(sys.stderr):  # the host's modules print
                figure = next(figures, None)
            if figure is None:
                break
            if options.smallest:
                figure = replace(figure, goal=None)
            missed += not figure.is_met
            print(json.dumps(figure.record()) if options.json else table_row(figure), flush=True)
    return 1 if missed else 0
