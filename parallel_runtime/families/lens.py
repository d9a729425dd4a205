"""Lens (comfy/ldm/lens/model.py@0.30.0): image and text apart in every block, one token per latent
pixel, under a mask over the keys of both that blocks check by its length.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import PIXELS, Config, Masks, Released, Size, sample

JOINT = ("img", "txt")

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens={"encoder_hidden_states": ("txt",), "hidden_states": ("img",)},
            control="input",
            along=(
                Along(arg="freqs_cis", dim=2, streams=JOINT),
                Along(arg="attention_mask", dim=3, streams=JOINT, masks_keys=True),
            ),
        ),
    ),
    leave=Leave(path="proj_out", stream="img"),
    patch_size=1,
)
TEXT_LAYERS = (5, 11, 17, 23)  # of the text encoder, side by side in a prompt's tokens


def config(size: Size) -> Config:
    return {
        "num_layers": size.blocks[0],
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "enc_hidden_dim": size.text_dim // len(TEXT_LAYERS),
        "axes_dims_rope": (4, 6, 6),
        "selected_layer_index": TEXT_LAYERS,
    }


RELEASED = Released(
    name="lens-3.8b",
    size=Size(heads=24, head_dim=64, blocks=(48,), text_dim=len(TEXT_LAYERS) * 2880),
    text=256,
    changes={"axes_dims_rope": (8, 28, 28)},
)

INPUTS = {"latents": PIXELS, "masks": Masks(text_only=True)}
SAMPLES = (sample("lens", "Lens", config, RELEASED, **INPUTS),)
