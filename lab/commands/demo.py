"""`python3 -m launcher demo`: run one stock workflow on a real ComfyUI server, by stock ComfyUI and
then by a pool of ranks, and show both side by side.

It writes a small random model and a LoRA, starts ComfyUI headless, and queues the same graph
through its API: what is timed. The pictures are captions that a small trained model draws. Where
there are fewer GPUs than ranks everything runs on the CPU, and one core stands for one GPU: stock
computes on one thread, and so does every rank.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch
from PIL import Image, ImageChops, ImageDraw
from safetensors.torch import load_file

from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ...parallel_runtime.families.every import sample_with
from ...parallel_runtime.families.sample import FileForm, Form, Size
from ..comfyui.api import Graph, node
from ..comfyui.server import ComfyServer
from ..pictures import showcase
from ..pictures.files import trained_files
from ..random_files import write_lora, write_model
from .parity import BOUND, relative_error

SEEDS = (1, 2, 3)  # of the rounds; the first loads and warms up and its times do not count
CAPACITY_BLOCKS = 8
CAPTIONS, SHOWN = "captions.png", (320, 320)  # the file of all captions; a side of the one that is compared
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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


SAMPLE, SIZE = sample_with("demo")


@dataclass(frozen=True)
class Workload:
    """A model and an image for which a forward takes 0.3 to 1 s on one CPU core."""

    size: Size = SIZE
    text_tokens: int = 77
    pixels: int = 320  # a side; 16 x 16 pixels are a token

    @property
    def form(self) -> Form:
        return SAMPLE.form

    @property
    def file(self) -> FileForm:
        assert SAMPLE.form.file is not None, f"{SAMPLE.name} has no file form"
        return SAMPLE.form.file

    @property
    def tokens(self) -> int:
        return self.text_tokens + (self.pixels // 16) ** 2

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.file.shapes(self.form.config(self.size)).values())


@dataclass(frozen=True)
class Sampled:
    """One run. `steps_s` are the times between its progress ticks. The first step, which may wait
    for a model, is left out.
    """

    steps_s: Sequence[float]
    latent: torch.Tensor
    preview: Image.Image


@dataclass(frozen=True)
class Round:
    """The same seed by stock and by the pool, one right after the other: machines are noisy."""

    stock: Sampled
    pool: Sampled

    @property
    def difference(self) -> float:
        return relative_error(self.pool.latent, self.stock.latent)


def main(argv: list[str], host: ComfyInstall) -> int:
    options = parse(argv)
    # Leaves the `with` blocks below, so ComfyUI does not outlive the demo
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work, out, ranks = Workload(), options.keep.absolute(), options.ranks
    out.mkdir(parents=True, exist_ok=True)
    on_cpu = torch.cuda.device_count() < ranks
    if on_cpu:
        print(
            f"Fewer GPUs than ranks here ({torch.cuda.device_count()} of {ranks}), so one CPU core stands for"
            " one GPU."
        )
    with (
        tempfile.TemporaryDirectory(prefix="pipemesh-demo-") as folder,
        Capacity(host.python, ranks if on_cpu else 0, work) as capacity,
    ):
        server = ComfyServer(
            host,
            base=Path(folder),
            log=out / "comfyui.log",
            cpu=on_cpu,
            env=ONE_THREAD,
            args=["--force-fp32"],
        )
        write_models(server.models, work)
        say("Starting ComfyUI")
        with server:
            rounds = [
                sample_round(server, seed, work, options.steps, pool_inputs(ranks, on_cpu), capacity)
                for seed in SEEDS
            ]
            last_run = pool_report(server)
            drawn = draw_captions(server, out / CAPTIONS, ranks, on_cpu)
    difference = max(one.difference for one in rounds)
    print(table(rounds[1:], ranks, capacity.value, difference, last_run))
    for path in [
        *write_pictures(out, compared(rounds[-1], drawn, ranks)),
        *([out / CAPTIONS] if drawn else []),
    ]:
        print(f"  {path}")
    if not difference <= BOUND:
        raise LaunchError(
            f"the latents differ by {difference:.1e} of their scale, more than {BOUND:.0e}: report it with"
            f" {server.log}."
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
        description=(
            "Run one stock workflow on stock ComfyUI and on a pool of ranks, and show both side by side."
        ),
    )
    parser.add_argument(
        "--ranks", type=at_least(2), default=2, help="processes that share one image (default 2)"
    )
    parser.add_argument("--steps", type=at_least(2), default=6, help="sampling steps of a run (default 6)")
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


def write_models(folder: Path, work: Workload) -> None:
    say(
        f"Writing a random {SAMPLE.name} model of {work.parameters / 1e6:.0f} M parameters in"
        f" {sum(work.size.blocks)} blocks"
    )
    model = write_model(folder / "diffusion_models" / "demo_model.safetensors", work.form, work.size)
    write_lora(folder / "loras" / "demo_lora.safetensors", model, work.file.lora_targets)


def pool_inputs(ranks: int, on_cpu: bool) -> dict[str, Any]:
    return {"devices": "cpu" if on_cpu else "auto", "layout": "by hand", "ulysses": ranks}


def draw_captions(
    server: ComfyServer, file: Path, ranks: int, on_cpu: bool
) -> dict[str, list[showcase.Drawn]]:
    """Draw captions by the trained model, stock, under Ulysses and under PipeFusion; none where it
    is not there.
    """
    try:
        trained_files()
    except LaunchError as error:
        print(f"No captions are drawn. {error}")
        return {}
    say("Drawing captions by the small trained model")
    showcase.copy_model(server.models)
    by_hand = {**pool_inputs(ranks, on_cpu), "layout": "by hand"}
    pools = {
        "stock": None,
        f"Ulysses, {ranks} ranks": by_hand,
        f"PipeFusion, {ranks} stages": {**by_hand, "ulysses": 1, "pipefusion": ranks},
    }
    return showcase.show(server, pools, file)


def workflow(work: Workload, steps: int, seed: int, name: str, pool: dict[str, Any] | None) -> Graph:
    """Make a text-to-image graph of stock nodes. With `pool`, PipeMesh Parallelize stands before
    the KSampler and nothing else differs.
    """
    prompt = {"tokens": work.text_tokens, "context_dim": work.size.text_dim, "vec_dim": work.size.pooled_dim}
    sampling = {"steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["lora" if pool is None else "parallel", 0], "latent_image": ["empty", 0]}
    graph = {
        "model": node("UNETLoader", unet_name="demo_model.safetensors", weight_dtype="default"),
        "lora": node(
            "LoraLoaderModelOnly", model=["model", 0], lora_name="demo_lora.safetensors", strength_model=1.0
        ),
        "prompt": node("PipeMeshDemoConditioning", seed=0, **prompt),
        "empty": node("EmptyLatentImage", width=work.pixels, height=work.pixels, batch_size=1),
        "sampler": node(
            "KSampler", seed=seed, positive=["prompt", 0], negative=["prompt", 0], **sampling, **links
        ),
        "save": node("PipeMeshDemoSaveLatent", samples=["sampler", 0], name=name),
    }
    if pool is not None:
        graph["pool"] = node("PipeMeshPool", **pool)
        graph["parallel"] = node("PipeMeshParallelize", model=["lora", 0], pool=["pool", 0])
    return graph


def sample_round(
    server: ComfyServer, seed: int, work: Workload, steps: int, pool: dict[str, Any], capacity: Capacity
) -> Round:
    purpose = "to load and warm up" if seed == SEEDS[0] else "measured"
    say(f"Round {seed} of {len(SEEDS)}, {purpose}: {steps} steps by stock ComfyUI, {steps} by the pool")
    stock = sample(server, f"stock_{seed}", workflow(work, steps, seed, f"stock_{seed}", None))
    capacity.take()
    parallel = sample(server, f"pool_{seed}", workflow(work, steps, seed, f"pool_{seed}", pool))
    capacity.take()
    return Round(stock, parallel)


def sample(server: ComfyServer, name: str, graph: Graph) -> Sampled:
    result = server.run(graph)
    if result.error is not None:
        raise LaunchError(
            f"the run {name} ended: {result.error}\nThe last lines of {server.log}:\n{server.log_tail()}"
        )
    if not result.previews:
        raise LaunchError(f"ComfyUI sent no preview of the run {name}: see {server.log}.")
    steps_s = [
        after.at_s - before.at_s for before, after in zip(result.ticks, result.ticks[1:], strict=False)
    ]
    latent = load_file(server.output / f"{name}.safetensors")["latent"]
    preview = Image.open(BytesIO(result.previews[-1])).convert("RGB")
    size = (latent.shape[-1] * 8, latent.shape[-2] * 8)
    return Sampled(steps_s, latent, preview.resize(size, Image.Resampling.BICUBIC))


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

    def __init__(self, python: str, ranks: int, work: Workload):
        self._ranks = ranks
        self._command = [
            python,
            "-c",
            CAPACITY_WORKER,
            *map(str, (work.tokens, work.size.hidden, work.size.heads, CAPACITY_BLOCKS)),
        ]
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
    rounds: Sequence[Round], ranks: int, capacity: float | None, difference: float, last_run: dict[str, Any]
) -> str:
    stock_s = statistics.median(step for one in rounds for step in one.stock.steps_s)
    pool_s = statistics.median(step for one in rounds for step in one.pool.steps_s)
    hop, sent = last_run.get("hop_ms_p50"), last_run.get("bytes_per_evaluation")
    rows = [
        ("", "stock", f"{ranks} ranks"),
        ("time per step", f"{stock_s:.3f} s", f"{pool_s:.3f} s"),
        ("speed-up", "", f"{stock_s / pool_s:.2f}x"),
        ("this machine's capacity", "", "n/a" if capacity is None else f"{capacity:.2f}x"),
        ("largest difference / scale", "", f"{difference:.1e}"),
        ("hop per evaluation", "", "n/a" if hop is None else f"{hop:.2f} ms"),
        ("sent per rank and evaluation", "", "n/a" if sent is None else f"{sent / 2**20:.1f} MiB"),
    ]
    lines = [f"  {name:30}{left:>12}{right:>12}" for name, left, right in rows]
    notes = [
        (
            f"The capacity is what {ranks} unrelated processes get done at once against one alone: no lasting"
            " speed-up can be larger."
        ),
        (
            f"Differences up to {BOUND:.0e} are float rounding. The hop is what the way to the pool and back"
            " adds to the ranks' own time."
        ),
    ]
    if capacity is not None and capacity < 0.75 * ranks:
        notes.append(
            f"Other programs are busy here, or there are fewer than {ranks} free cores: run it again on a"
            " quiet machine."
        )
    return "\n".join(["", *lines, "", *notes, ""])


def compared(one: Round, drawn: Mapping[str, Sequence[showcase.Drawn]], ranks: int) -> dict[str, Image.Image]:
    """Return the picture of stock, that of the ranks, and their difference, by what each is: of the
    first caption, else of the random model, which draws noise.
    """
    if not drawn:
        stock, pool = one.stock.preview, one.pool.preview
        difference = difference_image(one.stock.latent, one.pool.latent).resize(
            stock.size, Image.Resampling.NEAREST
        )
        return {
            "stock: noise, as the model is random": stock,
            f"{ranks} ranks": pool,
            f"difference, white is {BOUND:.0e}": difference,
        }
    stock, pool = (
        pictures[0].picture.resize(SHOWN, Image.Resampling.LANCZOS) for pictures in list(drawn.values())[:2]
    )
    difference = ImageChops.difference(stock, pool).convert("L").point([0] + 255 * [255])
    return {"stock": stock, f"{ranks} ranks": pool, "difference, white is any": difference}


def write_pictures(out: Path, columns: dict[str, Image.Image]) -> list[Path]:
    stock, pool, _ = columns.values()
    paths = [out / "stock.png", out / "pool.png", out / "contact_sheet.png"]
    for path, image in zip(paths, (stock, pool, contact_sheet(columns)), strict=True):
        image.save(path)
    return paths


def difference_image(stock: torch.Tensor, pool: torch.Tensor) -> Image.Image:
    """Draw the largest difference over the channels of the first latent, amplified: (1, C, H, W) ->
    H x W grey levels.
    """
    share_hw = (pool - stock).abs().amax(dim=1)[0] / (stock.std() * BOUND)
    return Image.fromarray((share_hw.clamp(0, 1) * 255).to(torch.uint8).numpy())


def contact_sheet(columns: dict[str, Image.Image], margin: int = 12, header: int = 24) -> Image.Image:
    width, height = next(iter(columns.values())).size
    sheet = Image.new("RGB", (margin + len(columns) * (width + margin), height + header + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (label, image) in enumerate(columns.items()):
        left = margin + index * (width + margin)
        draw.text((left, 6), label, fill="black")
        sheet.paste(image.convert("RGB"), (left, header))
    return sheet
