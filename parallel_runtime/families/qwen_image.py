"""Qwen-Image, Edit and Layered (comfy/ldm/qwen_image/model.py@0.30.0): text and image apart in
every block, reference latents behind the image.

Edit 2511 gives the references a timestep of their own. The mask closes tokens of the text alone.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from .plan import Along, BlockPatch, Blocks, Boundary, Leave, TokenPlan
from .sample import ONE_FRAME, Config, Masks, Released, Size, Tiny, random_extras, sample

BLOCKS = Blocks(
    path="transformer_blocks",
    tokens={"encoder_hidden_states": ("txt",), "hidden_states": ("img",)},
    control="input",
    along=(
        Along(arg="image_rotary_emb", dim=2, streams=("txt", "img")),
        Along(arg="encoder_hidden_states_mask", dim=1, streams=("txt",), masks_keys=True),
    ),
)
PLAN = TokenPlan(
    streams=("txt", "img"),
    blocks=(
        replace(
            BLOCKS,
            ranges=(Boundary(arg="timestep_zero_index", streams=("img",)),),
            patches=(
                BlockPatch(
                    code="comfy_extras.nodes_model_patch:DiffSynthCnetPatch", attributes=("encoded_image",)
                ),
            ),
            points={"double_block": {("txt", "img"): ("txt", "img")}},
        ),
    ),
    leave=Leave(path="proj_out", stream="img"),
)


def config(size: Size, **form: Any) -> Config:
    return {
        "num_layers": size.blocks[0],
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "joint_attention_dim": size.text_dim,
        "axes_dims_rope": (4, 6, 6),
        **form,
    }


RELEASED = Released(
    name="qwen-image-20b",
    size=Size(heads=24, head_dim=128, blocks=(60,), text_dim=3584),
    text=256,
    extent=(1328, 1328, 1),
    changes={"axes_dims_rope": (16, 56, 56)},
    title="Qwen-Image",
)


# Of other sizes than the latent
REFERENCES = random_extras(reference_latents=[(1, 16, 1, 9, 8), (1, 16, 1, 4, 8)])
LAYERS = {"even": (1, 16, 4, 8, 6), "odd": (1, 16, 3, 5, 6)}
EDIT = partial(config, default_ref_method="index_timestep_zero")
LAYERED = partial(config, default_ref_method="negative_index", use_additional_t_cond=True)
TINY = Tiny(blocks=(4,))
TEXT = {"tiny": TINY, "latents": ONE_FRAME, "masks": Masks(text_only=True)}

SAMPLES = (
    sample("qwen-image", "QwenImage", config, RELEASED, **TEXT),
    sample("qwen-image-edit", "QwenImage", EDIT, **TEXT, prompt_extras=REFERENCES),
    sample("qwen-image-layered", "QwenImage", LAYERED, tiny=TINY, latents=LAYERS, prompt_extras=REFERENCES),
)
