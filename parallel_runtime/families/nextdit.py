"""NextDiT (comfy/ldm/lumina/model.py@0.30.0): Lumina 2, NewBie, Z-Image. Text, reference images and
image are one sequence; refiners before the blocks see each kind alone, and run whole.

Z-Image Omni gives its references a timestep of zero: ``timestep_zero_index`` lists the ranges of
the tokens that have the sampler's. Ming-Image (model.py@617048a5) has its references behind the
image, whose frames are layers.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from .plan import Along, BlockPatch, Blocks, Leave, Ranges, Together, TokenPlan
from .sample import ONE_FRAME, Config, Released, Size, Tiny, random_extras, sample

JOINT = ("txt", "img")
SECOND_TIMESTEP = (Ranges(arg="timestep_zero_index", streams=JOINT),)

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="layers",
            tokens={"x": JOINT},
            lengths={"img": "noise_refiner.0"},
            along=(Along(arg="freqs_cis", dim=1, streams=JOINT),),
            ranges=SECOND_TIMESTEP,
            patches=(
                BlockPatch(code="comfy_extras.nodes_model_patch:ZImageControlPatch", adds=True, padded=True),
            ),
            points={"double_block": {JOINT: JOINT}},
        ),
    ),
    leave=Leave(path="final_layer", stream="img", streams=JOINT, ranges=SECOND_TIMESTEP),
    together=Together(refiners=("noise_refiner",), arguments=("ref_latents", "ref_frames")),
)

PIXELS = replace(
    PLAN,
    leave=Leave(path="layers", stream="img", streams=JOINT),
)

AXES = {16: [4, 6, 6], 64: [16, 24, 24], 96: [32, 32, 32], 128: [32, 48, 48]}  # head size -> position axes


def config(size: Size, **others: Any) -> Config:
    """Lumina 2, whose queries share keys."""
    return {
        "in_channels": 16,
        "dim": size.hidden,
        "n_layers": size.blocks[0],
        "n_refiner_layers": 1,
        "n_heads": size.heads,
        "n_kv_heads": 1,
        "multiple_of": 16,
        "ffn_dim_multiplier": 1.0,
        "qk_norm": True,
        "cap_feat_dim": size.text_dim,
        "axes_dims": AXES[size.head_dim],
        **others,
    }


def newbie_config(size: Size) -> Config:
    return config(size, clip_text_dim=size.pooled_dim)


def z_image_config(size: Size, **others: Any) -> Config:
    """Text and image padded to multiples, with tokens that are learned."""
    own = {
        "n_kv_heads": size.heads,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "rope_theta": 256.0,
        "pad_tokens_multiple": 8,
    }
    return config(size, **own, **others)


def ming_config(size: Size) -> Config:
    """Its text is padded for the positions alone, and its latents have frames."""
    others = {"image_model": "ming_image", "masked_pad_multiple": 8, "pad_tokens_multiple": None}
    return {**z_image_config(size), **others}


def pixel_config(size: Size) -> Config:
    """Pixels in place of latents, decoded token by token behind the blocks."""
    own = {"in_channels": 3, "patch_size": 4, "decoder_hidden_size": 32, "decoder_num_res_blocks": 1}
    return {**z_image_config(size), **own}


# Sizes in a list, where ComfyUI has a tuple: a tuple is a shape to draw
SEEN = SimpleNamespace(image_sizes=[[3, 32, 48]], last_hidden_state=(1, 6, 24))
# Two images to refer to, each with its text and its CLIP vision tokens, and a text behind them
references = random_extras(
    reference_latents=[(1, 16, 6, 8), (1, 16, 6, 4)],
    reference_latents_text_embeds=[(1, 5, 64), (1, 9, 64), (1, 6, 64)],
    unclip_conditioning=[{"clip_vision_output": SEEN}, {"clip_vision_output": SEEN}],
)
WIDE = {"n_refiner_layers": 2, "multiple_of": 256}
Z_IMAGE = Released(
    name="z-image-6b",
    size=Size(heads=30, head_dim=128, blocks=(30,), text_dim=2560),
    text=256,
    changes={**WIDE, "ffn_dim_multiplier": 8 / 3, "pad_tokens_multiple": 32},
)
LUMINA_2 = Released(
    name="lumina2-2.6b",
    size=Size(heads=24, head_dim=96, blocks=(26,), text_dim=2304),
    text=256,
    changes={**WIDE, "n_kv_heads": 8, "ffn_dim_multiplier": 4.0},
)
# Its modulation takes 256 numbers, and a model of fewer has not so many
z_image = partial(sample, tiny=Tiny(head_dim=64))

SAMPLES = (
    z_image("z-image", "ZImage", z_image_config, Z_IMAGE),
    z_image("z-image-omni", "ZImage", partial(z_image_config, siglip_feat_dim=24), prompt_extras=references),
    z_image(
        "z-image-pixel",
        "ZImagePixelSpace",
        pixel_config,
        latents={"even": (1, 3, 32, 24), "odd": (1, 3, 26, 36)},
    ),
    z_image(
        "ming-image",
        "MingImage",
        ming_config,
        since="0.39.0",
        latents={"even": (1, 16, 1, 16, 12), "odd": (1, 16, 3, 5, 6)},
    ),
    z_image(
        "ming-image-edit",
        "MingImage",
        ming_config,
        since="0.39.0",
        latents=ONE_FRAME,
        prompt_extras=random_extras(reference_latents=[(1, 16, 1, 6, 8), (1, 16, 1, 5, 4)]),
    ),
    sample("lumina2", "Lumina2", config, LUMINA_2),
    sample("newbie", "Lumina2", newbie_config),
)
UNRELEASED = {"comfy.ldm.lumina.model:NextDiTPixelSpace": "no released file says how large its patches are"}
