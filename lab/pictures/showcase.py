"""The demo's pictures: captions drawn by the trained model on stock ComfyUI, under Ulysses and
under PipeFusion, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import copyfile
from statistics import fmean, median
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw

from ...launcher.errors import LaunchError
from ..comfyui.api import Graph, node
from ..comfyui.server import ComfyServer
from .files import MODEL, VAE, trained_files
from .measures import psnr
from .scenes import SIDE

CAPTIONS = (
    "a red circle at the top left and a blue square at the bottom right on a striped ground",
    "a yellow ring at the centre on a dark ground",
    "a green triangle at the bottom left on a light ground",
    "a white square at the top right and a purple circle at the bottom left on a shaded ground",
)
STEPS, CFG, SEED = 20, 3.0, 7
MARGIN, LABEL, SCALE = 12, 20, 2
HEADER = 52  # three lines of a caption


def copy_model(models: Path) -> None:
    """Put the trained files where the server's loaders look."""
    for folder, file in zip(("diffusion_models", "vae"), trained_files(), strict=True):
        (models / folder).mkdir(parents=True, exist_ok=True)
        copyfile(file, models / folder / file.name)


def graph(caption: str, prefix: str, pool: Mapping[str, Any] | None) -> Graph:
    made = {
        "model": node("UNETLoader", unet_name=MODEL, weight_dtype="default"),
        "vae": node("VAELoader", vae_name=VAE),
        "positive": node("PipeMeshDemoCaption", caption=caption),
        "negative": node("PipeMeshDemoCaption", caption=""),
        "empty": node("EmptyLatentImage", width=SIDE, height=SIDE, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["model" if pool is None else "parallel", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["empty", 0],
            seed=SEED,
            steps=STEPS,
            cfg=CFG,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decoded", 0], filename_prefix=prefix),
    }
    if pool is not None:
        made["pool"] = node("PipeMeshPool", **pool)
        made["parallel"] = node("PipeMeshParallelize", model=["model", 0], pool=["pool", 0])
    return made


@dataclass(frozen=True)
class Drawn:
    """A picture, and the times between the ticks of its sampler's steps."""

    picture: Image.Image
    steps_s: Sequence[float] = ()


def draw_all(server: ComfyServer, pools: Mapping[str, Mapping[str, Any] | None]) -> dict[str, list[Drawn]]:
    """Draw each caption under each pool; the first is stock, whose pool is None."""
    return {name: [draw(server, caption, pool) for caption in CAPTIONS] for name, pool in pools.items()}


def draw(server: ComfyServer, caption: str, pool: Mapping[str, Any] | None) -> Drawn:
    result = server.run(graph(caption, "showcase", pool))
    if result.error is not None:
        raise LaunchError(
            f'the picture "{caption}" was not drawn: {result.error}\nThe last lines of'
            f" {server.log}:\n{server.log_tail()}"
        )
    (image,) = result.outputs["save"]["images"]
    steps_s = [
        after.at_s - before.at_s
        for before, after in pairwise(tick for tick in result.ticks if tick.node == "sampler")
    ]
    return Drawn(Image.open(server.output / image["subfolder"] / image["filename"]).convert("RGB"), steps_s)


def decibels(pictures: Sequence[Drawn], of: Sequence[Drawn]) -> list[float]:
    """The PSNR of each; one that is infinite counts as 99."""
    ours, stock = (
        torch.stack([torch.from_numpy(numpy.array(one.picture)) for one in each]).float() / 255
        for each in (pictures, of)
    )
    return psnr(ours, stock).clamp(max=99).tolist()


def step_s(drawn: Sequence[Drawn]) -> float | None:
    """The median time per step; the first picture, which may wait for a pool, does not count."""
    times = [time for one in drawn[1:] for time in one.steps_s]
    return median(times) if times else None


def label(name: str, drawn: Sequence[Drawn], stock: Sequence[Drawn]) -> str:
    """What a row says of itself: its PSNR, its time per step, how much faster than stock it is."""
    words = [] if drawn is stock else [f"PSNR {fmean(decibels(drawn, stock)):.1f} dB"]
    own_s, stock_s = step_s(drawn), step_s(stock)
    if own_s is not None:
        words.append(f"{1000 * own_s:.0f} ms per step")
    if own_s and stock_s and drawn is not stock:
        words.append(f"speed-up {stock_s / own_s:.2f}x")
    return ": ".join([name, *([", ".join(words)] if words else [])])


def sheet(drawn: Mapping[str, Sequence[Drawn]]) -> Image.Image:
    """A row for each method, a column for each caption, PSNR against the first row over each."""
    side = SIDE * SCALE
    stock = next(iter(drawn.values()))
    height = side + MARGIN + 2 * LABEL
    picture = Image.new("RGB", (MARGIN + len(stock) * (side + MARGIN), HEADER + len(drawn) * height), "white")
    pen = ImageDraw.Draw(picture)
    for column, caption in enumerate(CAPTIONS[: len(stock)]):
        pen.text((MARGIN + column * (side + MARGIN), 6), lines_of(pen, caption, side), fill="black")
    for row, (name, pictures) in enumerate(drawn.items()):
        top = HEADER + row * height
        pen.text((MARGIN, top), label(name, pictures, stock), fill="black")
        for column, (one, value) in enumerate(zip(pictures, decibels(pictures, stock), strict=True)):
            left = MARGIN + column * (side + MARGIN)
            if pictures is not stock:
                pen.text(
                    (left, top + LABEL - 2), "equal" if value == 99 else f"{value:.1f} dB", fill="#555555"
                )
            picture.paste(
                one.picture.resize((side, side), Image.Resampling.LANCZOS), (left, top + 2 * LABEL - 4)
            )
    return picture


def lines_of(pen: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """Break a text into lines that are no wider."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def show(
    server: ComfyServer,
    pools: Mapping[str, Mapping[str, Any] | None],
    file: Path,
    say: Callable[[str], None] = print,
) -> dict[str, list[Drawn]]:
    """Draws each caption under each pool, says how near and how fast they are, and saves them side
    by side.
    """
    drawn = draw_all(server, pools)
    stock = next(iter(drawn.values()))
    for name, pictures in drawn.items():
        say(f"  {label(name, pictures, stock)}")
    say(
        f"  over {len(CAPTIONS)} captions of {SIDE} x {SIDE} pixels, too few tokens to gain time by; PSNR 99"
        " is equal"
    )
    sheet(drawn).save(file)
    return drawn
