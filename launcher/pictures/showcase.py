"""The demo's pictures: captions drawn by the trained model on stock ComfyUI, under Ulysses and
under PipeFusion, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw

from ..comfyui.api import Graph
from ..comfyui.install import LaunchError
from ..comfyui.server import ComfyServer
from .files import ASSETS, MODEL, VAE
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


def is_trained() -> bool:
    return all((ASSETS / name).exists() for name in (MODEL, VAE))


def copy_model(models: Path) -> None:
    """Put the trained files where the server's loaders look."""
    for folder, name in (("diffusion_models", MODEL), ("vae", VAE)):
        (models / folder).mkdir(parents=True, exist_ok=True)
        copyfile(ASSETS / name, models / folder / name)


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


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def draw_all(server: ComfyServer, pools: Mapping[str, Mapping[str, Any] | None]) -> dict[str, list[Image.Image]]:
    """Draw each caption under each pool; the first is stock, whose pool is None."""
    return {name: [draw(server, caption, pool) for caption in CAPTIONS] for name, pool in pools.items()}


def draw(server: ComfyServer, caption: str, pool: Mapping[str, Any] | None) -> Image.Image:
    result = server.run(graph(caption, "showcase", pool))
    if result.error is not None:
        raise LaunchError(f'the picture "{caption}" was not drawn: {result.error}\nThe last lines of {server.log}:\n{server.log_tail()}')
    (image,) = result.outputs["save"]["images"]
    return Image.open(server.output / image["subfolder"] / image["filename"]).convert("RGB")


def decibels(pictures: Sequence[Image.Image], of: Sequence[Image.Image]) -> float:
    """The mean PSNR; one that is infinite counts as 99."""
    ours, stock = (torch.stack([torch.from_numpy(numpy.array(picture)) for picture in each]).float() / 255 for each in (pictures, of))
    return float(psnr(ours, stock).clamp(max=99).mean())


def sheet(drawn: Mapping[str, Sequence[Image.Image]]) -> Image.Image:
    """A row for each method, a column for each caption, PSNR against the first row."""
    side = SIDE * SCALE
    stock = next(iter(drawn.values()))
    size = (MARGIN + len(stock) * (side + MARGIN), MARGIN + (len(drawn) + 1) * LABEL + len(drawn) * (side + MARGIN))
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    for column, caption in enumerate(CAPTIONS[: len(stock)]):
        pen.text((MARGIN + column * (side + MARGIN), 6), shortened(pen, caption, side), fill="black")
    for row, (name, pictures) in enumerate(drawn.items()):
        top = MARGIN + LABEL + row * (side + MARGIN + LABEL)
        label = name if pictures is stock else f"{name}: PSNR {decibels(pictures, stock):.1f} dB"
        pen.text((MARGIN, top), label, fill="black")
        for column, each in enumerate(pictures):
            picture.paste(each.resize((side, side), Image.Resampling.LANCZOS), (MARGIN + column * (side + MARGIN), top + LABEL - 4))
    return picture


def shortened(pen: ImageDraw.ImageDraw, text: str, width: int) -> str:
    text = text.replace(" at the", ",").replace(" on a ", "; ").replace("a ", "")
    while pen.textlength(text) > width:
        text = text[:-2]
    return text


def show(server: ComfyServer, pools: Mapping[str, Mapping[str, Any] | None], file: Path, say: Callable[[str], None] = print) -> None:
    drawn = draw_all(server, pools)
    stock = next(iter(drawn.values()))
    for name, pictures in list(drawn.items())[1:]:
        say(f"  {name}: PSNR {decibels(pictures, stock):.1f} dB against stock over {len(CAPTIONS)} captions (99 is equal)")
    sheet(drawn).save(file)
