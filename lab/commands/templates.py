"""``python3 -m lab templates``: the official workflow templates that sample an image or video
transformer, by stock ComfyUI and through a pool, at the same seed.

They run on a real server, as they are. Only loaders are stood in for: small random models of
ComfyUI's own classes, in the weight format that a template names; text encoders and VAEs of the
right shapes; pictures, videos and sounds. One rule makes all sizes and steps small.
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
from ..comfyui.api import ServerError
from ..comfyui.server import ROOT, ComfyServer
from ..templates.files import Template, templates
from ..templates.graph import api_prompt
from ..templates.run import Outcome, Tries
from ..templates.workflow import GraphError

PACKS = {"pipemesh": ROOT, "pipemesh_stand_ins.py": ROOT / "lab" / "templates" / "stand_ins" / "pack.py"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
METHODS = ("ulysses", "ring", "pipefusion")
WHOLE = 10000  # evaluations that PipeFusion warms up with: all of them are exact
BAD = ("different", "error")


def pool_inputs(method: str, ranks: int) -> dict[str, Any]:
    return {"devices": "cpu", "layout": "by hand", "ulysses": 1, method: ranks, "warm_up": WHOLE}


def tried(
    host: ComfyInstall, chosen: list[Template], pool: dict[str, Any], folder: Path, log: Path
) -> Iterator[Outcome]:
    """Try each template on a server that is started again where it died."""
    left = list(chosen)
    while left:
        with ComfyServer(
            host, base=folder, log=log, env=ONE_THREAD, custom_nodes=PACKS, api_nodes=True
        ) as server:
            tries = Tries(server, server.get("/object_info"), pool)
            while left:
                template = left.pop(0)
                try:
                    yield outcome_of(tries, template)
                except ServerError as gone:
                    yield Outcome(name=template.name, result="error", reason=str(gone))
                    break


def outcome_of(tries: Tries, template: Template) -> Outcome:
    """Raises ServerError where the server is gone."""
    try:
        graph = api_prompt(template.workflow(), tries.info)
    except GraphError as error:
        return Outcome(name=template.name, result="error", reason=str(error))
    return tries.outcome(template.name, graph)


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
    parser.add_argument("--log", type=Path, metavar="FILE", help="for ComfyUI's log")
    parser.add_argument("--json", action="store_true", help="one object per line, as they come")
    options = parser.parse_args(argv)
    chosen = [
        one
        for one in templates(host)
        if not options.name or any(fnmatch(one.name, pattern) for pattern in options.name)
    ]
    if not chosen:
        raise LaunchError(f"No template's name fits {', '.join(options.name)}: leave --name out for all.")
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="pipemesh-templates-") as folder:
        log = (options.log or Path(folder) / "comfyui.log").absolute()
        for outcome in tried(host, chosen, pool_inputs(options.method, options.ranks), Path(folder), log):
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
        f"{outcome.result:9} {outcome.name}{figure}  {outcome.seconds:.0f}"
        f" s{'  ' * bool(outcome.reason)}{outcome.reason}"
    )
