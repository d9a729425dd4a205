"""OmniGen2 and Boogu (comfy/ldm/omnigen/omnigen2.py, comfy/ldm/boogu/model.py@0.30.0): text,
reference images and image in one sequence; Boogu has blocks that keep the text apart before it.

Refiners before the blocks see each kind alone, and run whole.
"""

from dataclasses import replace
from typing import Any

import torch

from .plan import Along, Blocks, Leave, Together, TokenPlan
from .sample import Config, Masks, Released, Size, Tiny, random_extras, sample

JOINT, IMG = ("txt", "img"), ("img",)
REFINED = Together(refiners=("noise_refiner",))

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="layers",
            tokens={"hidden_states": JOINT},
            lengths={"img": "x_embedder"},
            along=(Along(arg="image_rotary_emb", dim=1, streams=JOINT),),
        ),
    ),
    leave=Leave(path="norm_out", stream="img", streams=JOINT),
    together=REFINED,
)

BOOGU = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="double_stream_layers",
            tokens={"instruct_hidden_states": ("txt",), "img_hidden_states": IMG},
            returns=("img_hidden_states", "instruct_hidden_states"),
            self_attention_2="img_self_attn",
            along=(
                Along(arg="joint_rotary_emb", dim=1, streams=JOINT),
                Along(arg="img_rotary_emb", dim=1, streams=IMG),
            ),
        ),
        Blocks(
            path="single_stream_layers",
            tokens={"hidden_states": JOINT},
            along=(Along(arg="image_rotary_emb", dim=1, streams=JOINT),),
        ),
    ),
    leave=Leave(path="norm_out", stream="img", streams=JOINT),
    also_attend_alone=IMG,
    together=replace(REFINED, arguments=("ref_latents",)),
)


def config(size: Size, **others: Any) -> Config:
    return {
        "hidden_size": size.hidden,
        "num_layers": size.blocks[-1],
        "num_refiner_layers": 1,
        "num_attention_heads": size.heads,
        "num_kv_heads": 1,
        "multiple_of": 16,
        "axes_dim_rope": (4, 6, 6),
        **others,
    }


def omnigen2_config(size: Size) -> Config:
    return config(size, text_feat_dim=size.text_dim, timestep_scale=1000.0)


def boogu_config(size: Size) -> Config:
    return config(size, instruction_feat_dim=size.text_dim, num_double_stream_layers=size.blocks[0])


WIDE = {"num_refiner_layers": 2, "num_kv_heads": 7, "multiple_of": 256, "axes_dim_rope": (40, 40, 40)}
RELEASED = Released(
    name="omnigen2-4b",
    size=Size(heads=21, head_dim=120, blocks=(32,), text_dim=2048),
    text=256,
    changes=WIDE,
    extras=random_extras(attention_mask=torch.ones(1, 256, dtype=torch.int64)),
    reads_prompt=True,
)
RELEASED_BOOGU = replace(
    RELEASED, name="boogu-image-0.1", size=Size(heads=28, head_dim=120, blocks=(8, 32), text_dim=4096)
)
REFERENCES = random_extras(reference_latents=[(1, 16, 6, 8), (1, 16, 6, 4)])
OPEN, BOTH = Masks(open=True), Tiny(blocks=(2, 3))

SAMPLES = (
    sample("omnigen2", "Omnigen2", omnigen2_config, RELEASED, masks=OPEN, prompt_extras=REFERENCES),
    sample("boogu", "Boogu", boogu_config, RELEASED_BOOGU, masks=OPEN, tiny=BOTH),
    sample("boogu-edit", "Boogu", boogu_config, masks=OPEN, tiny=BOTH, prompt_extras=REFERENCES),
)
