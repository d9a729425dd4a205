"""Mage-Flow (comfy/ldm/mage_flow/model.py@0.30.0): Qwen-Image's blocks, one token per latent pixel.

Reference latents stand behind the image. The mask closes tokens of the text alone.
"""

from dataclasses import replace

from . import qwen_image
from .sample import PIXELS, Config, Masks, Released, Size, random_extras, sample

PLAN = replace(
    qwen_image.PLAN,
    blocks=(qwen_image.BLOCKS,),
)


def config(size: Size) -> Config:
    return {
        "num_layers": size.blocks[0],
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "joint_attention_dim": size.text_dim,
        "axes_dims_rope": (4, 6, 6),
    }


LARGE = Size(heads=24, head_dim=128, blocks=(12,), text_dim=2560)
WIDE = {"axes_dims_rope": (16, 56, 56)}
RELEASED = Released(name="mage-flow-4b", size=LARGE, text=256, changes=WIDE, extras=random_extras())
REFERENCES = random_extras(reference_latents=[(1, 128, 4, 3)])
INPUTS = {"latents": PIXELS, "masks": Masks(text_only=True), "prompt_extras": REFERENCES}
SAMPLES = (sample("mage_flow", "MageFlow", config, RELEASED, **INPUTS),)
