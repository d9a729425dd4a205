"""`python3 -m launcher demo`: draw pictures on a real ComfyUI server, by stock ComfyUI and by a
pool of ranks, and show both side by side.

It starts ComfyUI headless and queues the same graph through its API; the model is a small one that
was trained on drawn shapes. Where there are fewer GPUs than ranks everything runs on the CPU, and
one core stands for one GPU: stock computes on one thread, and so does every rank.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch

from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ..comfyui.server import ONE_THREAD, ComfyServer
from ..pictures import showcase
from ..pictures.network import Width
from ..pictures.scenes import LARGER_SIDE
from ..pictures.showcase import Drawn

SHOWN, TOKEN = LARGER_SIDE, 16  # sides in pixels, of a picture and of what is a token
MODEL = Width()
# 20 steps at cfg 3 make 4e-4 of a latent's scale out of rounding alone, so pictures are compared
LEAST_DB = 70.0
CAPACITY_BLOCKS = 8
CAPACITY_WORKER = """
import sys, time, torch
torch.set_num_threads(1)
tokens, hidden, heads, blocks = map(int, sys.argv[1:])
x, up = torch.randn(tokens, hidden), torch.randn(hidden, 6 * hidden)
down = torch.randn(6 * hidden, hidden) / (6 * hidden)
for _ in sys.stdin:
    start = time.perf_counter()
    for _ in range(blocks):
        q = x.view(1, tokens, heads, -1).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.nn.functional.gelu(x @ up) @ down
    print(time.perf_counter() - start, flush=True)
"""


def main(argv: list[str], host: ComfyInstall) -> int:
    options = parse(argv)
    # Leaves the `with` blocks below, so ComfyUI does not outlive the demo
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out, ranks = options.keep.absolute(), options.ranks
    out.mkdir(parents=True, exist_ok=True)
    on_cpu = torch.cuda.device_count() < ranks
    if on_cpu:
        print(
            f"Fewer GPUs than ranks here ({torch.cuda.device_count()} of {ranks}), so one CPU core stands for"
            " one GPU."
        )
    with tempfile.TemporaryDirectory(prefix="pipemesh-demo-") as folder:
        server = ComfyServer(
            host,
            base=Path(folder),
            log=out / "comfyui.log",
            cpu=on_cpu,
            env=ONE_THREAD,
            # By itself ComfyUI has a slower attention on CPUs than ranks have
            args=["--force-fp32", "--use-pytorch-cross-attention"],
        )
        showcase.copy_files(server.models, SHOWN)
        say("Starting ComfyUI")
        with Capacity(host.python, ranks if on_cpu else 0) as capacity, server:
            rows, last_run = draw_rows(server, ranks, options.steps, on_cpu, capacity)
    stock, ours, _approximate = rows.values()
    print(table(stock, ours, ranks, capacity.value, last_run))
    for name, drawn in rows.items():
        print(f"  {showcase.label(name, drawn, stock)}")
    showcase.sheet(rows).save(out / "captions.png")
    stock[0].picture.save(out / "stock.png")
    ours[0].picture.save(out / "pool.png")
    for name in ("stock.png", "pool.png", "captions.png"):
        print(f"  {out / name}")
    least = min(showcase.decibels(ours, stock))
    if not least >= LEAST_DB:
        raise LaunchError(
            f"a picture of the {ranks} ranks has a PSNR of {least:.1f} dB to stock's, and rounding leaves"
            f" {LEAST_DB:.0f} or more: report it with {server.log}."
        )
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    def at_least(least: int) -> Any:
        def number(text: str) -> int:
            if int(text) < least:
                raise argparse.ArgumentTypeError(f"{text} is less than {least}")
            return int(text)

        return number

    parser = argparse.ArgumentParser(
        prog="python3 -m launcher demo",
        description="Draw pictures by stock ComfyUI and by a pool of ranks, and show both side by side.",
    )
    parser.add_argument(
        "--ranks", type=at_least(2), default=2, help="processes that share one image (default 2)"
    )
    parser.add_argument(
        "--steps",
        type=at_least(2),
        default=showcase.STEPS,
        help=f"sampling steps of a picture (default {showcase.STEPS})",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="for pictures and log (default ./demo-output)",
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(f"{text} ...", flush=True)


def draw_rows(
    server: ComfyServer, ranks: int, steps: int, on_cpu: bool, capacity: Capacity
) -> tuple[dict[str, list[Drawn]], dict[str, Any]]:
    """Draw each caption by stock and by the ranks, one right after the other, as machines are
    noisy, then all by PipeFusion. Returns the rows of the sheet, and the figures of the ranks' last
    run. The first picture of each row loads and warms up.
    """
    devices = {"devices": "cpu" if on_cpu else "auto", "layout": "by hand"}
    cfg = 2 if ranks % 2 == 0 else 1  # each group computes one of the two prompts
    ulysses = math.gcd(ranks // cfg, MODEL.heads)
    exact = {**devices, "ulysses": ulysses, "ring": ranks // cfg // ulysses, "cfg": cfg}
    stages = min(ranks, MODEL.double_blocks + MODEL.single_blocks)
    stock, ours = [], []
    for number, caption in enumerate(showcase.CAPTIONS, 1):
        purpose = "to load and warm up" if number == 1 else "timed"
        say(f"Picture {number} of {len(showcase.CAPTIONS)}, {purpose}, by stock ComfyUI and by {ranks} ranks")
        for row, pool in ((stock, None), (ours, exact)):
            row.append(showcase.draw(server, caption, pool, SHOWN, steps))
            capacity.take()
    last_run = pool_report(server)
    say("The same by PipeFusion")
    pipeline = {**devices, "ulysses": 1, "pipefusion": stages}
    drawn = [showcase.draw(server, caption, pipeline, SHOWN, steps) for caption in showcase.CAPTIONS]
    rows = {"stock": stock, f"{ranks} ranks": ours, f"{stages} stages of PipeFusion, approximate": drawn}
    return rows, last_run


def pool_report(server: ComfyServer) -> dict[str, Any]:
    """Ask the server for the figures of the pool's last run, by name; {} where it has none."""
    try:
        runs = server.get("/pipemesh/status")["last_runs"]
    except HTTPError as error:
        if error.code != 404:
            raise
        return {}
    return (runs[0]["figures"] or {}) if runs else {}


class Capacity:
    """Measure how much more single-threaded work the machine gets done when `ranks` processes
    compute at once than when one does: at most `ranks` times as much.

    It wavers with the other programs there, so its rounds are taken around the runs that it is
    compared with. With 0 ranks nothing is measured.
    """

    def __init__(self, python: str, ranks: int):
        self._ranks = ranks
        work = ((SHOWN // TOKEN) ** 2, MODEL.hidden, MODEL.heads, CAPACITY_BLOCKS)
        self._command = [python, "-c", CAPACITY_WORKER, *map(str, work)]
        self._workers: list[subprocess.Popen[str]] = []
        self._rounds: list[tuple[float, float]] = []

    def __enter__(self) -> Capacity:
        self._workers = [
            subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for _ in range(self._ranks)
        ]
        if self._workers:
            self._slowest_s(self._ranks)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.communicate()

    def take(self, rounds: int = 2) -> None:
        if not self._workers:
            return
        self._rounds += [(self._slowest_s(1), self._slowest_s(self._ranks)) for _ in range(rounds)]

    @property
    def value(self) -> float | None:
        if not self._rounds:
            return None
        alone_s, together_s = (statistics.median(times) for times in zip(*self._rounds, strict=True))
        return self._ranks * alone_s / together_s

    def _slowest_s(self, count: int) -> float:
        asked = [(worker, worker.stdout) for worker in self._workers[:count] if worker.stdout is not None]
        for worker, _ in asked:
            print(file=worker.stdin)
        return max(float(answer.readline()) for _, answer in asked)


def table(
    stock: Sequence[Drawn],
    ours: Sequence[Drawn],
    ranks: int,
    capacity: float | None,
    last_run: dict[str, Any],
) -> str:
    stock_s, ours_s = showcase.step_s(stock), showcase.step_s(ours)
    hop, sent = last_run.get("hop_ms_p50"), last_run.get("bytes_per_evaluation")
    rows = [
        ("", "stock", f"{ranks} ranks"),
        ("time per step", f"{stock_s:.3f} s", f"{ours_s:.3f} s"),
        ("speed-up", "", f"{stock_s / ours_s:.2f}x"),
        ("this machine's capacity", "", "n/a" if capacity is None else f"{capacity:.2f}x"),
        ("largest difference of a pixel", "", f"{showcase.largest_difference(ours, stock)} of 255"),
        ("hop per evaluation", "", "n/a" if hop is None else f"{hop:.2f} ms"),
        ("sent per rank and evaluation", "", "n/a" if sent is None else f"{sent / 2**20:.1f} MiB"),
    ]
    lines = [f"  {name:30}{left:>12}{right:>12}" for name, left, right in rows]
    notes = [
        (
            f"The capacity is what {ranks} unrelated processes get done at once against one alone: no lasting"
            " speed-up can be larger."
        ),
        "The hop is what the way to the pool and back adds to the ranks' own time.",
    ]
    if capacity is not None and capacity < 0.75 * ranks:
        notes.append(
            f"Other programs are busy here, or there are fewer than {ranks} free cores: run it again on a"
            " quiet machine."
        )
    return "\n".join(["", *lines, "", *notes, ""])
