"""PixelDiT and PiD (comfy/ldm/pixeldit/model.py, pid.py@0.30.0): text and patches of pixels in the
blocks; behind them, blocks of pixels look at all patches and run whole on every rank.

PiD adds features of a small picture to the tokens before some of its blocks.
"""

from dataclasses import replace
from typing import Any

import torch

from .plan import Along, Blocks, Insert, Leave, Together, TokenPlan
from .sample import Config, Released, Size, Tiny, random_extras, sample

BLOCKS = Blocks(
    path="patch_blocks",
    tokens={"y": ("y",), "x": ("x",)},
    returns=("x", "y"),
    along=(Along(arg="pos_txt", dim=0, streams=("y",)), Along(arg="pos_img", dim=0, streams=("x",))),
)
PLAN = TokenPlan(
    streams=("y", "x"),
    blocks=(BLOCKS,),
    leave=Leave(path="patch_blocks", stream="x"),
    together=Together(always="its blocks of pixels, which look at the whole picture"),
)
GATES = Insert(path="lq_proj.gate_modules.*", along=(Along(arg="lq", dim=1, streams=("x",)),))
PID = replace(PLAN, blocks=(replace(BLOCKS, inserts=(GATES,)),))


def config(size: Size) -> Config:
    """Patches of 4 x 4 pixels."""
    return {
        "num_groups": size.heads,
        "hidden_size": size.hidden,
        "patch_depth": size.blocks[0],
        "patch_size": 4,
        "pixel_attn_hidden_size": 32,
        "pixel_num_groups": 2,
        "txt_embed_dim": size.text_dim,
    }


def pid_config(size: Size) -> Config:
    picture = {"lq_hidden_dim": 16, "lq_num_res_blocks": 1, "pit_lq_inject": True}
    return {**config(size), **picture}


# The extras of the PiD node: a latent of the picture, and how much noise it has
small_picture = random_extras(lq_latent=(1, 16, 2, 3), degrade_sigma=torch.tensor([0.2]))


def quarter(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the PiD node for a picture of a quarter of the width, whose latent has a pixel
    for each 8.
    """
    height, width = latent.shape[2:]
    return {"lq_latent": torch.zeros(1, 16, height // 32, width // 32), "degrade_sigma": torch.zeros(1)}


LARGE = Size(heads=24, head_dim=64, blocks=(14,), text_dim=2304)
WIDE = {"patch_size": 16, "pixel_attn_hidden_size": 1152, "pixel_num_groups": 16}
RELEASED = Released(name="pixeldit-1.3b", size=LARGE, text=300, changes=WIDE)
RELEASED_PID = Released(
    name="pid-flux1",
    size=LARGE,
    text=300,
    extent=(2048, 2048, 1),
    changes={**WIDE, "lq_hidden_dim": 512, "lq_num_res_blocks": 4, "pit_lq_inject": False},
    extras=quarter,
)
INPUTS = {"tiny": Tiny(blocks=(4,)), "latents": {"even": (1, 3, 16, 12), "odd": (1, 3, 11, 20)}}

SAMPLES = (
    sample("pixeldit", "PixelDiTT2I", config, RELEASED, **INPUTS),
    sample("pid", "PiD", pid_config, RELEASED_PID, prompt_extras=small_picture, **INPUTS),
)
