"""Mage-Flow (comfy/ldm/mage_flow/model.py@0.30.0): Qwen-Image's blocks, one token per latent pixel.

Reference latents stand behind the image. The mask closes tokens of the text alone.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Config, Family, Form, Masks, Released, Sample, Size, random_extras

JOINT = ("txt", "img")

PLAN = TokenPlan(
    family="mage_flow",
    models=("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",),
    streams=JOINT,
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens={"encoder_hidden_states": ("txt",), "hidden_states": ("img",)},
            control="input",
            along=(
                Along(arg="image_rotary_emb", dim=2, streams=JOINT),
                Along(arg="encoder_hidden_states_mask", dim=1, streams=("txt",), masks_keys=True),
            ),
        ),
    ),
    leave=Leave(path="proj_out", stream="img"),
    positions=("pe_embedder",),
)


def config(size: Size) -> Config:
    return {
        "image_model": "mage_flow",
        "num_layers": size.blocks[0],
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "joint_attention_dim": size.text_dim,
        "axes_dims_rope": (4, 6, 6),
    }


LARGE = Size(heads=24, head_dim=128, blocks=(12,), text_dim=2560)
WIDE = {"axes_dims_rope": (16, 56, 56)}
RELEASED = Released(name="mage-flow-4b", size=LARGE, text=256, changes=WIDE, extras=random_extras())

MAGE_FLOW = Family(
    plans=(PLAN,),
    samples=(
        Sample(
            name="mage_flow",
            form=Form(config_class="MageFlow", config=config, released=(RELEASED,)),
            latents={"even": (1, 128, 8, 6), "odd": (1, 128, 7, 9)},
            masks=Masks(text_only=True),
            prompt_extras=random_extras(reference_latents=[(1, 128, 4, 3)]),
        ),
    ),
)
