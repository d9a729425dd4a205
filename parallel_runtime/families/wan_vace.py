"""Wan VACE (comfy/ldm/wan/model.py:VaceWanModel@0.30.0): blocks of a second container run behind
some of the first, on the tokens of given videos and on the video's own from before the blocks.
"""

from dataclasses import replace
from typing import Any

import torch

from . import wan
from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Config, Family, Form, Sample, Size, Tiny, random_extras

BLOCKS = Blocks(
    path="blocks",
    tokens={"x": wan.IMG},
    along=(Along(arg="freqs", dim=1, streams=wan.IMG),),
    local=("cross_attn",),
)
PLAN = TokenPlan(
    family="wan_vace",
    models=("comfy.ldm.wan.model:VaceWanModel",),
    streams=wan.IMG,
    blocks=(
        BLOCKS,
        replace(BLOCKS, path="vace_blocks", tokens={"c": wan.IMG, "x": wan.IMG}, interleaved=True),
    ),
    leave=Leave(path="head", stream="img"),
    positions=wan.PLAN.positions,
)


def config(size: Size) -> Config:
    return {**wan.config(size, model_type="vace"), "vace_layers": size.blocks[1], "vace_in_dim": 32 + 64}


def two_videos(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of two VACE nodes: videos, what of them stays, and how much they count."""
    generator = torch.Generator().manual_seed(9)
    frames = torch.randn(2, 1, 32, *latent.shape[2:], generator=generator)
    masks = torch.rand(2, 1, 64, *latent.shape[2:], generator=generator).round()
    return {"vace_frames": list(frames), "vace_mask": list(masks), "vace_strength": [1.0, 0.5]}


LARGE = wan.released("wan2.1-vace-14b", 40, 40, 13824, (832, 480, 81))
# One video, as ComfyUI makes it itself
RELEASED = replace(LARGE, size=replace(LARGE.size, blocks=(40, 8)), extras=random_extras())

WAN_VACE = Family(
    plans=(PLAN,),
    samples=(
        Sample(
            name="wan-vace",
            form=Form(config_class="WAN21_Vace", config=config, released=(RELEASED,)),
            tiny=Tiny(blocks=(4, 2)),
            latents={"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 6)},
            prompt_extras=two_videos,
        ),
    ),
)
