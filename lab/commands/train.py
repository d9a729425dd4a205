"""`python3 -m lab train`: train the small model of the demo, from its first
picture to files that ComfyUI's own loaders read.

Everything lies in the cache folder, the two results too: the demo's own files are replaced only
where ``--export`` names their folder. The command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...launcher.cache import cache_folder
from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ..demo_nodes.captions import conditioning
from ..pictures.autoencoder import CELL
from ..pictures.files import ASSETS, LARGER_MODEL, trained_files, write_files, write_model
from ..pictures.network import Width
from ..pictures.picture_set import picture_set, set_file
from ..pictures.scenes import LARGER_SIDE, SIDE, scenes_by_chance
from ..pictures.training import CHECKPOINT, LARGER, Recipe, Training, run, sampled

SAMPLES, SAMPLE_SEED = 16, 12345
TRAINED = "trained"  # in the folder: the two results
CHECKPOINT_BYTES = 170 * 10**6  # while another is written both are there
SMALLEST = Width(hidden=128, double_blocks=1, single_blocks=1)
LEAST_SIDE, SIDES = 64, 16  # pixels: of the decoder's crops, and of a token


def main(argv: list[str], host: ComfyInstall) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    # A set that is half drawn leaves no file
    at_end = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_flush_denormal(True)
    try:
        with TemporaryDirectory(prefix="pipemesh-train-") as folder:
            if options.smallest:
                options.folder, options.export = Path(folder), None
            return train(options)
    finally:
        torch.set_flush_denormal(False)
        signal.signal(signal.SIGTERM, at_end)


def train(options: argparse.Namespace) -> int:
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not options.only_export:
        require_room(folder, set_file(folder, options.pictures, options.side), options)
    pictures = picture_set(folder, options.pictures, options.side, progress=drawn)
    recipe = replace(
        LARGER if options.larger else Recipe(),
        iterations=options.iterations,
        decoder_iterations=options.decoder_iterations,
        seconds=options.minutes * 60,
        bfloat16=not options.fp32,
        threads=options.threads,
    )
    width = SMALLEST if options.smallest else Width()
    if options.larger:
        width = Width(step=SIDE / LARGER_SIDE)
    training = Training(pictures, width, recipe, options.seed)
    if options.larger:
        training.begin_with(*map(load_file, trained_files()))
    checkpoint = folder / CHECKPOINT
    if options.only_export and not checkpoint.exists():
        raise LaunchError(f"There is no {checkpoint}: train first, without --only-export.")
    if checkpoint.exists():
        go_on_from(training, checkpoint)
        say(f"Going on from iteration {training.transformer.iteration} of {checkpoint}")
    began = time.monotonic()
    if not options.only_export:
        for record in run(
            training,
            folder,
            options.save_every * 60,
            stop_at(options.until),
            lambda made: draw_samples(made, folder),
        ):
            show(record, time.monotonic() - began)
        print()
    if not training.is_done and not options.only_export:
        print(
            f"Stopped at iteration {training.transformer.iteration} of {recipe.iterations}: the same command"
            " goes on from there."
        )
        print("With --only-export it writes the model as it is now.")
        return 0
    for file in written(training, folder, options):
        print(f"  {file}")
    if options.export is None:
        print(
            f"The demo draws with the files in {ASSETS}: --only-export --export lab/assets puts these in"
            " their place."
        )
    return 0


def written(training: Training, folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write what was trained; return the files."""
    into = options.export or folder / TRAINED
    if not options.larger:
        return write_files(training, folder, into)
    into.mkdir(parents=True, exist_ok=True)
    write_model(training, into / LARGER_MODEL)
    return [into / LARGER_MODEL]


def require_room(folder: Path, drawn: Path, options: argparse.Namespace) -> None:
    """Raise LaunchError if the disk has no room for the set and two checkpoints."""
    checkpoint = folder / CHECKPOINT
    needed = 2 * CHECKPOINT_BYTES - (checkpoint.stat().st_size if checkpoint.exists() else 0)
    needed += 0 if drawn.exists() else options.pictures * 3 * options.side**2
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(
            f"{folder} has {free / 1e9:.1f} GB free and training takes {needed / 1e9:.1f}: make room, or"
            " choose --folder."
        )


def go_on_from(training: Training, checkpoint: Path) -> None:
    try:
        training.load(checkpoint)
    except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise LaunchError(
            f"{checkpoint} is no checkpoint of this model ({error}): remove it to begin anew."
        ) from error


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab train",
        description="Train the demo's small model. It goes on where it stopped.",
    )
    parser.add_argument(
        "--larger",
        action="store_true",
        help=f"go on with the small model's weights on pictures of {LARGER_SIDE} pixels a side",
    )
    larger = "--larger" in argv
    recipe = LARGER if larger else Recipe()
    side, pictures = (LARGER_SIDE, 2048) if larger else (SIDE, 16384)
    parser.add_argument(
        "--folder",
        type=Path,
        default=cache_folder(os.environ) / ("training-larger" if larger else "training"),
        help="for the set, checkpoints and the log",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=recipe.iterations,
        help=f"of the transformer (default {recipe.iterations})",
    )
    decoders = f"of the decoder (default {recipe.decoder_iterations})"
    parser.add_argument(
        "--decoder-iterations", type=int, default=recipe.decoder_iterations, metavar="N", help=decoders
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="of training in all, if that is less")
    parser.add_argument(
        "--until",
        type=time_of_day,
        metavar="HH:MM",
        help="a time of the day, UTC, to stop at; run it again to go on",
    )
    parser.add_argument(
        "--pictures", type=int, default=pictures, help=f"size of the set (default {pictures})"
    )
    parser.add_argument("--side", type=int, default=side, help=f"of a picture, in pixels (default {side})")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, noise and the order of pictures (default 0)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that share a batch")
    parser.add_argument(
        "--save-every", type=float, default=4.0, metavar="MINUTES", help="between checkpoints (default 4)"
    )
    exported = f"for the two files (default `{TRAINED}` in the folder); lab/assets replaces the demo's"
    parser.add_argument("--export", type=Path, metavar="FOLDER", help=exported)
    parser.add_argument(
        "--only-export", action="store_true", help="write the two files of the last checkpoint, done or not"
    )
    parser.add_argument(
        "--fp32", action="store_true", help="compute in fp32; bf16 takes half the time where the CPU has it"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="one iteration of a tiny model, whose files are not kept"
    )
    options = parser.parse_args(argv)
    if options.smallest:
        options.iterations = options.decoder_iterations = options.threads = 1
        options.pictures, options.side, options.fp32 = 2, LEAST_SIDE, True
    least = {"iterations": 1, "decoder_iterations": 0, "pictures": 1, "threads": 1, "seed": 0}
    for name, fewest in least.items():
        if (given := getattr(options, name)) < fewest:
            parser.error(f"--{name.replace('_', '-')} {given}: choose {fewest} or more")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: choose more than 0")
    if options.side < LEAST_SIDE or options.side % SIDES:
        parser.error(f"--side {options.side}: choose a multiple of {SIDES}, {LEAST_SIDE} or more")
    return options


def time_of_day(text: str) -> datetime.time:
    try:
        return datetime.datetime.strptime(text, "%H:%M").time()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no time of the day: say, for example, 23:30") from None


def stop_at(until: datetime.time | None) -> Callable[[], bool]:
    """Return a question that is true from that time on, or once the command is asked to end; asked
    by the keyboard a second time, it ends at once.
    """
    asked: list[Any] = []

    def ask(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    if until is None:
        return lambda: bool(asked)
    now = datetime.datetime.now(datetime.timezone.utc)
    end = now.replace(hour=until.hour, minute=until.minute, second=0)
    if end <= now:
        end += datetime.timedelta(days=1)
    return lambda: bool(asked) or datetime.datetime.now(datetime.timezone.utc) >= end


@torch.no_grad()
def draw_samples(training: Training, folder: Path) -> None:
    """Write a sheet of samples by the averaged weights, to look at."""
    scenes = scenes_by_chance(SAMPLE_SEED, SAMPLES)
    transformer, decoder = training.transformer, training.decoder
    tokens = torch.stack([conditioning(scene) for scene in scenes])
    side = training.pictures.pictures.shape[-1] // CELL
    with (
        transformer.as_averaged(),
        decoder.as_averaged(),
        torch.autocast("cpu", torch.bfloat16, enabled=training.recipe.bfloat16),
    ):
        latents = sampled(transformer.network, tokens, side, SAMPLE_SEED)
        pictures = decoder.network(latents).float()
    rows = [torch.cat(list(row), dim=2) for row in pictures.clamp(0, 1).split(8)]
    sheet = (torch.cat(rows, dim=1).permute(1, 2, 0) * 255).to(torch.uint8)
    Image.fromarray(sheet.numpy()).save(folder / f"samples-{transformer.iteration:06}.png")
    (folder / "samples.txt").write_text("".join(f"{scene}\n" for scene in scenes))


def show(record: dict[str, float], elapsed_s: float) -> None:
    done = int(record["progress"] * 30)
    bar = "#" * done + "." * (30 - done)
    losses = "  ".join(
        f"{name.removesuffix('_loss')} {value:.4f}"
        for name, value in record.items()
        if name.endswith("_loss")
    )
    line = (
        f"{bar} {record['progress']:6.1%}  iteration {record['iteration']}  {losses} "
        f" {elapsed_s / 60:.0f} min"
    )
    print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def drawn(done: int) -> None:
    if done % 2048 == 0:
        say(f"Drawn {done} pictures")


def say(text: str) -> None:
    print(f"{text} ...", flush=True)
