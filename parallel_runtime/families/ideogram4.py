"""Ideogram 4 (comfy/ldm/ideogram4/model.py@0.30.0): text and image in one sequence, one token per
latent pixel. A negative without a text is the image alone.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import PIXELS, Config, Masks, Released, Size, sample

JOINT = ("txt", "img")

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="layers",
            tokens={"x": JOINT},
            lengths={"txt": "llm_cond_proj"},
            along=(Along(arg="freqs_cis", dim=1, streams=JOINT),),
        ),
    ),
    leave=Leave(path="final_layer", stream="img", streams=JOINT),
    patch_size=1,
)


def config(size: Size) -> Config:
    return {
        "num_layers": size.blocks[0],
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "intermediate_size": 96,
        "adaln_dim": 32,
        "llm_features_dim": size.text_dim,
        "mrope_section": [4, 2, 2],
    }


RELEASED = Released(
    name="ideogram4-9.3b",
    size=Size(heads=18, head_dim=256, blocks=(34,), text_dim=13 * 4096),
    text=512,
    changes={"intermediate_size": 12288, "adaln_dim": 512, "mrope_section": [24, 20, 20]},
)

INPUTS = {"latents": PIXELS, "masks": Masks(text_only=True)}
SAMPLES = (sample("ideogram4", "Ideogram4", config, RELEASED, **INPUTS),)
