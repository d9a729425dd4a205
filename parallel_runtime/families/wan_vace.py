"""Wan VACE (comfy/ldm/wan/model.py:VaceWanModel@0.30.0): blocks of a second container run behind
some of the first, on the tokens of given videos and on the video's own from before the blocks.
"""

from dataclasses import replace

import torch

from . import wan
from .sample import Config, Extras, Size, Tiny, random_extras, sample

VACE = replace(wan.PLAIN, path="vace_blocks", tokens={"c": wan.IMG, "x": wan.IMG}, interleaved=True)
PLAN = replace(
    wan.ONE_TIMESTEP,
    blocks=(wan.PLAIN, VACE),
)


def config(size: Size) -> Config:
    return {**wan.config(size, model_type="vace"), "vace_layers": size.blocks[1], "vace_in_dim": 32 + 64}


VIDEOS = random_extras(
    vace_frames=[(1, 32, ...), (1, 32, ...)],
    vace_mask=[(1, 64, ...), (1, 64, ...)],
    vace_strength=[1.0, 0.5],
)


def two_videos(latent: torch.Tensor) -> Extras:
    """The extras of two VACE nodes: videos, masks of the parts that stay, and strengths."""
    made = VIDEOS(latent)
    return {**made, "vace_mask": [(mask > 0).float() for mask in made["vace_mask"]]}


LARGE = wan.released("wan2.1-vace-14b")
# One video, as ComfyUI makes it itself
RELEASED = replace(LARGE, size=replace(LARGE.size, blocks=(40, 8)), extras=random_extras())

SAMPLES = (
    sample(
        "wan-vace",
        "WAN21_Vace",
        config,
        RELEASED,
        tiny=Tiny(blocks=(4, 2)),
        latents={"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 6)},
        prompt_extras=two_videos,
    ),
)
