"""Wan 2.1 and 2.2 (comfy/ldm/wan/model.py@0.30.0): video tokens alone in the blocks, text through
cross-attention.

The 5B model may modulate per frame: ``e`` has one row per frame then, else one.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .plan import Along, BlockPatch, Blocks, Insert, Leave, TokenPlan
from .sample import (
    VIDEO,
    Config,
    Extent,
    Extras,
    FileForm,
    Form,
    Released,
    Sample,
    Size,
    keep_first_frame,
    random_extras,
    sample,
)

IMG = ("img",)

PATCHES = (
    BlockPatch(code="comfy_extras.nodes_model_patch:WanUni3CCnetPatch", adds=True, padded=True),
    BlockPatch(code="comfyui-kjnodes:WanCrossAttentionPatch.__get__.<locals>.wrapped_attention"),
    BlockPatch(code="comfyui-kjnodes:WanffnChunkPatch.__get__.<locals>.wrapped_forward"),
)
POINTS = {
    "double_block": {IMG: IMG},
    "attn1_patch": {("x",): IMG, ("q",): IMG, ("k",): IMG},
    "attn2_patch": {("x",): IMG},
}

FREQS, E = Along(arg="freqs", dim=1, streams=IMG), Along(arg="e", dim=1, streams=IMG, repeated=True)
PLAIN = Blocks(path="blocks", tokens={"x": IMG}, along=(FREQS,), local=("cross_attn",))
BLOCKS = replace(PLAIN, along=(FREQS, E), patches=PATCHES, points=POINTS)
PLAN = TokenPlan(
    streams=IMG,
    blocks=(BLOCKS,),
    leave=Leave(path="head", stream="img", along=(E,)),
)


def with_insert(insert: Insert, **blocks: Any) -> TokenPlan:
    """Returns the plan of a model that has this insert in or between the blocks of Wan."""
    return replace(PLAN, blocks=(replace(BLOCKS, inserts=(insert,), **blocks),))


# Of models with one timestep for all frames
ONE_TIMESTEP = replace(PLAN, blocks=(PLAIN,), leave=Leave(path="head", stream="img"))


def config(size: Size, channels: int = 16, extra_channels: int = 0, model_type: str = "t2v") -> Config:
    """``extra_channels`` follow the latent's channels: a given image and its mask."""
    return {
        "model_type": model_type,
        "dim": size.hidden,
        "ffn_dim": 128,
        "num_heads": size.heads,
        "num_layers": size.blocks[0],
        "in_dim": channels + extra_channels,
        "out_dim": channels,
        "text_dim": size.text_dim,
    }


SEEN = SimpleNamespace(penultimate_hidden_states=(1, 9, 1280))


def first_frame(latent: torch.Tensor) -> Extras:
    """The extras that an image-to-video node adds to a prompt: the frame as latent channels, and as
    CLIP sees it.
    """
    made = random_extras(concat_latent_image=tuple(latent.shape), clip_vision_output=SEEN)(latent)
    return {**made, "concat_mask": torch.ones(1, 1, *latent.shape[2:])}


def released(
    name: str,
    heads: int = 40,
    blocks: int = 40,
    ffn: int = 13824,
    extent: Extent = (832, 480, 81),
    **changes: Any,
) -> Released:
    size = Size(heads=heads, head_dim=128, blocks=(blocks,), text_dim=4096)
    changes = {"ffn_dim": ffn, **changes}
    return Released(name=name, size=size, text=512, extent=extent, changes=changes)


T2V = (
    replace(released("wan2.2-t2v-14b", extent=(1280, 720, 81)), title="Wan 2.2 14B"),
    released("wan2.1-t2v-1.3b", 12, 30, 8960),
)

I2V = partial(config, extra_channels=20, model_type="i2v")
FILE = FileForm(
    head_dim=128,
    text_dim=4096,
    lora_targets=("attn.q", "attn.k", "attn.v", "attn.o", "ffn.0", "ffn.2"),
)
SAMPLES = (
    Sample(
        name="wan2.1-t2v",
        form=Form(config_class="WAN21_T2V", config=config, file=FILE, released=T2V),
        larger={"equal": Size(heads=16, head_dim=16, blocks=(24,))},
        latents=VIDEO,
        stands_for=("Along", "Blocks.local"),
    ),
    sample(
        "wan2.1-i2v",
        "WAN21_I2V",
        I2V,
        released("wan2.1-i2v-14b"),
        latents=VIDEO,
        prompt_extras=first_frame,
        stands_for=("channels beside the latent",),
    ),
    sample(
        "wan2.2-5b",
        "WAN22_T2V",
        partial(config, channels=48),
        released("wan2.2-ti2v-5b", 24, 30, 14336, (1280, 704, 121)),
        latents={"even": (1, 48, 3, 8, 6), "odd": (1, 48, 3, 5, 6)},
        noise_mask=keep_first_frame,
        stands_for=("Along.repeated",),
    ),
)
