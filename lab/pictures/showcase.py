"""The demo's pictures: captions drawn by a trained model on stock ComfyUI and by ranks, side by
side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from statistics import fmean, median
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from ...launcher.errors import LaunchError
from ..comfyui.api import Graph, node
from ..comfyui.server import ComfyServer
from .files import LARGER_MODEL, MODEL, VAE, trained_files
from .measures import psnr
from .scenes import LARGER_SIDE, SIDE

CAPTIONS = (
    "a red circle at the top left and a green triangle at the bottom right on a shaded ground",
    "a yellow ring at the centre on a dark ground",
    "a blue triangle at the top right and a purple circle at the bottom left on a light ground",
)
MODELS = {SIDE: MODEL, LARGER_SIDE: LARGER_MODEL}  # by a picture's side in pixels
STEPS, CFG, SEED = 20, 3.0, 7
THUMBNAIL, MARGIN, LABEL, FONT = 256, 12, 24, 14  # pixels
HEADER = 66  # three lines of a caption


def copy_files(models: Path, side: int) -> None:
    """Put the files that draw pictures of this side where the server's loaders look."""
    for folder, file in zip(("diffusion_models", "vae"), trained_files(MODELS[side]), strict=True):
        (models / folder).mkdir(parents=True, exist_ok=True)
        copyfile(file, models / folder / file.name)


def graph(caption: str, pool: Mapping[str, Any] | None, side: int, steps: int) -> Graph:
    """Make a text-to-image graph of stock nodes. With `pool`, PipeMesh Parallelize stands before
    the KSampler and nothing else differs.
    """
    scale = SIDE / side  # tokens of a larger picture stand among those of a small one
    unmoved = {"shift_x": 0.0, "shift_y": 0.0, "shift_t": 0.0}
    made = {
        "model": node("UNETLoader", unet_name=MODELS[side], weight_dtype="default"),
        "scaled": node("ScaleROPE", model=["model", 0], scale_x=scale, scale_y=scale, scale_t=1.0, **unmoved),
        "vae": node("VAELoader", vae_name=VAE),
        "positive": node("PipeMeshDemoCaption", caption=caption),
        "negative": node("PipeMeshDemoCaption", caption=""),
        "empty": node("EmptyLatentImage", width=side, height=side, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["scaled" if pool is None else "parallel", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["empty", 0],
            seed=SEED,
            steps=steps,
            cfg=CFG,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decoded", 0], filename_prefix="showcase"),
    }
    if pool is not None:
        made["pool"] = node("PipeMeshPool", **pool)
        made["parallel"] = node("PipeMeshParallelize", model=["scaled", 0], pool=["pool", 0])
    return made


@dataclass(frozen=True)
class Drawn:
    """A picture, and the times between the ticks of its sampler's steps: the first step, which may
    wait for a model, is not among them.
    """

    picture: Image.Image
    steps_s: Sequence[float]


def draw(
    server: ComfyServer, caption: str, pool: Mapping[str, Any] | None, side: int, steps: int = STEPS
) -> Drawn:
    result = server.run(graph(caption, pool, side, steps))
    if result.error is not None:
        raise LaunchError(
            f'the picture "{caption}" was not drawn: {result.error}\nThe last lines of'
            f" {server.log}:\n{server.log_tail()}"
        )
    (image,) = result.outputs["save"]["images"]
    picture = Image.open(server.output / image["subfolder"] / image["filename"]).convert("RGB")
    return Drawn(picture, result.steps_s("sampler"))


def in_bytes(drawn: Sequence[Drawn]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(numpy.array(one.picture)) for one in drawn]).float()


def largest_difference(drawn: Sequence[Drawn], of: Sequence[Drawn]) -> int:
    """Of a pixel's colour, out of 255."""
    return int((in_bytes(drawn) - in_bytes(of)).abs().max())


def decibels(drawn: Sequence[Drawn], of: Sequence[Drawn]) -> list[float]:
    """The PSNR of each; one that is infinite counts as 99."""
    return psnr(in_bytes(drawn) / 255, in_bytes(of) / 255).clamp(max=99).tolist()


def step_s(drawn: Sequence[Drawn]) -> float:
    """The median time per step; the first picture, which may wait for a pool, does not count."""
    return median(time for one in drawn[1:] for time in one.steps_s)


def label(name: str, drawn: Sequence[Drawn], stock: Sequence[Drawn]) -> str:
    """What a row says of itself: how fast it is, and how far from stock's."""
    text = f"{name}: {step_s(drawn):.3f} s per step"
    if drawn is stock:
        return text
    return (
        f"{text}, {step_s(stock) / step_s(drawn):.2f} times as fast, differs by at most"
        f" {largest_difference(drawn, stock)} of 255 (PSNR {fmean(decibels(drawn, stock)):.1f} dB)"
    )


def sheet(rows: Mapping[str, Sequence[Drawn]]) -> Image.Image:
    """A row for each method, the first of them stock, a column for each caption."""
    stock = next(iter(rows.values()))
    column, row = THUMBNAIL + MARGIN, LABEL + THUMBNAIL + MARGIN
    picture = Image.new("RGB", (MARGIN + len(stock) * column, HEADER + len(rows) * row), "white")
    pen = ImageDraw.Draw(picture)
    pen.font = ImageFont.load_default(FONT)
    for number, caption in enumerate(CAPTIONS[: len(stock)]):
        pen.text((MARGIN + number * column, 4), lines_of(pen, caption, THUMBNAIL), fill="#555555")
    for top, (name, drawn) in zip(range(HEADER, picture.height, row), rows.items(), strict=True):
        pen.text((MARGIN, top + 2), label(name, drawn, stock), fill="black")
        for number, one in enumerate(drawn):
            thumbnail = one.picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
            picture.paste(thumbnail, (MARGIN + number * column, top + LABEL))
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
