"""``python3 -m lab templates``: the official workflow templates that sample an image or video
transformer, by stock ComfyUI and through a pool, at the same seed.

They run on a real server, as they are. Only loaders are stood in for: small random models of
ComfyUI's own classes, in the weight format that a template names; text encoders and VAEs of the
right shapes; pictures, videos and sounds. One rule makes all sizes and steps small. ComfyUI's own
page makes the prompts, in a headless Chromium.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ...parallel_runtime.planner.ways import ASKED
from ..comfyui.api import ServerError
from ..comfyui.server import ONE_THREAD, ROOT, ComfyServer
from ..templates.cut import Graph
from ..templates.files import prompts
from ..templates.run import Outcome, Tries

PACKS = {"pipemesh": ROOT, "pipemesh_stand_ins.py": ROOT / "lab" / "templates" / "stand_ins" / "pack.py"}
KEPT = ROOT / "lab" / "templates" / "prompts.json"
METHODS = ("ulysses", "ring", "pipefusion")
WHOLE = 10000  # evaluations that PipeFusion warms up with: all of them are exact
BAD = ("different", "error")


def pool_inputs(method: str, ranks: int, weights: str = ASKED[0]) -> dict[str, Any]:
    layout = {"devices": "cpu", "layout": "by hand", "ulysses": 1, method: ranks, "warm_up": WHOLE}
    return {**layout, "weights": weights}


def tried(
    host: ComfyInstall, chosen: dict[str, Graph], pool: dict[str, Any], folder: Path, log: Path
) -> Iterator[Outcome]:
    """Try each template's prompt on a server that is started again where it died."""
    left = list(chosen)
    while left:
        with ComfyServer(
            host, base=folder, log=log, env=ONE_THREAD, custom_nodes=PACKS, api_nodes=True
        ) as server:
            tries = Tries(server, server.get("/object_info"), pool)
            while left:
                name = left.pop(0)
                try:
                    yield tries.outcome(name, chosen[name])
                except ServerError as gone:
                    yield Outcome(name=name, result="error", reason=str(gone))
                    break


def kept_prompts(file: Path | None, host: ComfyInstall, names: list[str]) -> dict[str, Graph]:
    """The prompts of the templates whose name fits one of `names`, or of all: those in the file, or
    the page's, which are written into the file where there is none.
    """

    def is_wanted(name: str) -> bool:
        return not names or any(fnmatch(name, pattern) for pattern in names)

    if file is None or not file.exists():
        found = prompts(host, is_wanted)
        if file is not None:
            file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        found = json.loads(file.read_text(encoding="utf-8"))
    return {name: prompt for name, prompt in found.items() if is_wanted(name)}


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab templates", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="GLOB",
        help="only templates whose name fits; several times for several",
    )
    parser.add_argument("--method", choices=METHODS, default="ulysses", help="default ulysses")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share one image (default 2)")
    parser.add_argument("--weights", choices=ASKED, default=ASKED[0], help="default auto")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="takes the prompts that this file has in place of the page's; makes it where it is missing",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="for ComfyUI's log")
    parser.add_argument("--json", action="store_true", help="one object per line, as they come")
    parser.add_argument("--smallest", action="store_true", help="one template, of the prompts that are kept")
    options = parser.parse_args(argv)
    chosen = kept_prompts(KEPT if options.smallest else options.prompts, host, options.name)
    if options.smallest:
        chosen = dict([min(chosen.items(), key=lambda one: len(one[1]))])
    if not chosen:
        raise LaunchError(f"No template's name fits {', '.join(options.name)}: leave --name out for all.")
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="pipemesh-templates-") as folder:
        log = (options.log or Path(folder) / "comfyui.log").absolute()
        pool = pool_inputs(options.method, options.ranks, options.weights)
        for outcome in tried(host, chosen, pool, Path(folder), log):
            results[outcome.result] += 1
            print(json.dumps(asdict(outcome)) if options.json else line_of(outcome), flush=True)
    print(", ".join(f"{number} {result}" for result, number in results.most_common()), file=sys.stderr)
    return 1 if any(results[result] for result in BAD) else 0


def line_of(outcome: Outcome) -> str:
    figure = (
        ""
        if outcome.error is None
        else f" {outcome.error:.1e}" + (f" ({outcome.ratio:.2f} x)" if outcome.ratio is not None else "")
    )
    return (
        f"{outcome.result:10} {outcome.name}{figure}  {outcome.seconds:.0f}"
        f" s{'  ' * bool(outcome.reason)}{outcome.reason}"
        f"{'  known by its name alone: ' * bool(outcome.by_name)}{', '.join(outcome.by_name)}"
    )
