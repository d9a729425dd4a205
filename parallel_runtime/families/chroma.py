"""Chroma and Chroma Radiance (comfy/ldm/chroma/model.py, chroma_radiance/model.py@0.30.0): the
blocks of Flux, their modulation computed once for all of them.

Radiance makes pixels of all tokens behind the blocks, and its last layer looks at neighbours.
"""

from dataclasses import replace
from typing import Any

import torch

from . import flux
from .plan import Leave, Together
from .sample import Config, Masks, Released, Size, Tiny, sample

PLAN = replace(
    flux.PLAN,
    blocks=(flux.DOUBLE, flux.SINGLE),
)

RADIANCE = replace(
    PLAN,
    leave=Leave(path="single_blocks", stream="img"),
    together=Together(always="the last layer of Chroma Radiance, which looks at neighbouring pixels"),
)


def config(size: Size) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "in_channels": 64,
        "out_channels": 64,
        "context_in_dim": size.text_dim,
        "hidden_size": size.hidden,
        "mlp_ratio": 4.0,
        "num_heads": size.heads,
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "axes_dim": [4, 6, 6],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "in_dim": 64,
        "out_dim": size.hidden,
        "hidden_dim": 48,
        "n_layers": 2,
        "txt_ids_dims": [],
        "vec_in_dim": None,
    }


def radiance_config(size: Size) -> Config:
    """Tokens of 4 x 4 pixels, a conv at the end, predictions of the picture itself."""
    head: dict[str, Any] = {
        "nerf_hidden_size": 16,
        "nerf_mlp_ratio": 2,
        "nerf_depth": 2,
        "nerf_max_freqs": 4,
        "nerf_tile_size": 512,
    }
    head |= {
        "nerf_final_head_type": "conv",
        "nerf_embedder_dtype": None,
        "use_x0": True,
        "use_sequential_txt_ids": True,
    }
    pixels = {"in_channels": 3, "out_channels": 3, "patch_size": 4}
    return {**config(size), **pixels, **head}


RELEASED = Released(
    name="chroma1-hd",
    size=Size(heads=24, head_dim=128, blocks=(19, 38), text_dim=4096),
    text=512,
    changes={"axes_dim": [16, 56, 56], "hidden_dim": 5120, "n_layers": 5},
)

RELEASED_RADIANCE = replace(
    RELEASED,
    name="chroma1-radiance",
    changes={
        **RELEASED.changes,
        "patch_size": 16,
        "nerf_hidden_size": 64,
        "nerf_mlp_ratio": 4,
        "nerf_depth": 4,
        "nerf_max_freqs": 8,
        "nerf_embedder_dtype": torch.float32,
    },
)

TINY = Tiny(blocks=(2, 2))

SAMPLES = (
    sample("chroma", "Chroma", config, RELEASED, tiny=TINY, masks=Masks()),
    sample(
        "chroma-radiance",
        "ChromaRadiance",
        radiance_config,
        RELEASED_RADIANCE,
        tiny=TINY,
        latents={"even": (1, 3, 16, 12), "odd": (1, 3, 12, 20)},
    ),
)
