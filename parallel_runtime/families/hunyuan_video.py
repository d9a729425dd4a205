"""HunyuanVideo 1 and 1.5, Hunyuan-Image 2.1 (comfy/ldm/hunyuan_video/model.py@0.30.0): blocks as
Flux has them, with the text refined before them.

A given frame has a timestep of its own; single blocks count its tokens from the text's first one
on. A reference's tokens stand before the image's and are cut off behind the blocks, by how many
they are in all: the rows leave there.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flux
from .plan import Leave, Ranges, TokenPlan
from .sample import Config, Masks, Released, Size, Tiny, random_extras, sample

PLAN = TokenPlan(
    streams=flux.JOINT,
    blocks=(
        replace(flux.DOUBLE, ranges=flux.IMAGE_RANGES),
        replace(flux.SINGLE, ranges=(Ranges(arg="modulation_dims", streams=flux.JOINT),)),
    ),
    leave=Leave(path="single_blocks", stream="img"),
)


def config(size: Size, **form: Any) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": size.pooled_dim,
        "context_in_dim": size.text_dim,
        "hidden_size": size.hidden,
        "mlp_ratio": 4.0,
        "num_heads": size.heads,
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "axes_dim": [4, 6, 6],
        "theta": 256,
        "patch_size": [1, 2, 2],
        "qkv_bias": True,
        "guidance_embed": True,
        "byt5": False,
        "meanflow": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
        **form,
    }


def reference(latent: torch.Tensor) -> dict[str, Any]:
    return {"ref_latent": torch.randn(latent[:, :, :1].shape, generator=torch.Generator().manual_seed(4))}


GLYPHS = {"conditioning_byt5small": (1, 5, 1472)}  # the words to be written, by a second text encoder
# The first frame as latent channels, and as a CLIP vision embedding
SEEN = SimpleNamespace(last_hidden_state=(1, 7, 1152))
picture = random_extras(**GLYPHS, concat_latent_image=(1, 32, ...), clip_vision_output=SEEN)
GUIDED = random_extras(guiding_frame_index=0)
VIDEO = {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 10)}
NEXT = {
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
}
NEXT |= {"byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True}
IMAGE = {
    "in_channels": 64,
    "out_channels": 64,
    "patch_size": [1, 1],
    "axes_dim": [8, 8],
    "vec_in_dim": None,
    "byt5": True,
    "meanflow": True,
}


RELEASED = Released(
    name="hunyuan-video-13b",
    size=Size(heads=24, head_dim=128, blocks=(20, 40), text_dim=4096, pooled_dim=768),
    text=256,
    extent=(1280, 720, 129),
    changes={"axes_dim": [16, 56, 56]},
)


TINY = Tiny(blocks=(2, 2))

SAMPLES = (
    sample(
        "hunyuan-video",
        "HunyuanVideo",
        config,
        RELEASED,
        tiny=TINY,
        latents=VIDEO,
        masks=Masks(text_only=True),
        prompt_extras=GUIDED,
    ),
    sample(
        "hunyuan-video-reference",
        "HunyuanVideo",
        config,
        tiny=TINY,
        latents=VIDEO,
        prompt_extras=reference,
    ),
    sample(
        "hunyuan-video-1.5",
        "HunyuanVideo15",
        partial(config, **NEXT),
        tiny=TINY,
        latents={"even": (1, 32, 3, 4, 4), "odd": (1, 32, 3, 3, 5)},
        prompt_extras=picture,
    ),
    sample(
        "hunyuan-image",
        "HunyuanImage21",
        partial(config, **IMAGE),
        tiny=TINY,
        latents={"even": (1, 64, 8, 6), "odd": (1, 64, 5, 7)},
        prompt_extras=random_extras(**GLYPHS),
    ),
)
