"""Kandinsky 5, image and video (comfy/ldm/kandinsky5/model.py@0.30.0): image tokens alone in the
visual blocks, text through cross-attention.

The text's own blocks run whole on every rank. Behind the visual blocks the tokens take the shape
of the video again, so they leave there.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Config, Released, Size, TokenParts, sample

IMG, CROSS = ("visual_embed",), ("cross_attention",)

PLAN = TokenPlan(
    streams=IMG,
    blocks=(
        Blocks(
            path="visual_transformer_blocks",
            tokens={"visual_embed": IMG},
            along=(Along(arg="freqs", dim=1, streams=IMG),),
            local=CROSS,
        ),
    ),
    leave=Leave(path="visual_transformer_blocks", stream="visual_embed"),
)


def config(size: Size) -> Config:
    """The video form, whose input has a given image and its mask beside the latent."""
    return {
        "in_text_dim": size.text_dim,
        "in_text_dim2": size.pooled_dim,
        "time_dim": 32,
        "model_dim": size.hidden,
        "ff_dim": 96,
        "axes_dims": (4, 6, 6),
        "num_visual_blocks": size.blocks[0],
    }


LARGE = Size(heads=28, head_dim=64, blocks=(32,), text_dim=3584, pooled_dim=768)
WIDE = {"axes_dims": (16, 24, 24), "ff_dim": 7168, "time_dim": 512}
RELEASED = Released(
    name="kandinsky5-lite",
    size=LARGE,
    text=256,
    extent=(768, 512, 121),
    changes=WIDE,
    cut=TokenParts(chunks=(2, 4)),
)

LATENTS = {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 6)}
INPUTS = {"latents": LATENTS, "stands_for": ("leaves_behind_blocks",)}
SAMPLES = (sample("kandinsky5", "Kandinsky5", config, RELEASED, **INPUTS),)
