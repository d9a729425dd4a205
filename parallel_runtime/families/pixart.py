"""PixArt Alpha and Sigma (comfy/ldm/pixart/pixartms.py@0.30.0): image tokens alone in the blocks,
text through cross-attention; attention passes no options.
"""

from .plan import Blocks, Leave, TokenPlan
from .sample import Config, Released, Size, sample

PLAN = TokenPlan(
    streams=("x",),
    blocks=(Blocks(path="blocks", tokens={"x": ("x",)}, without_options="attn"),),
    leave=Leave(path="final_layer", stream="x"),
)


def config(size: Size) -> Config:
    return {
        "num_heads": size.heads,
        "hidden_size": size.hidden,
        "depth": size.blocks[0],
        "caption_channels": size.text_dim,
        "model_max_length": 300,
        "micro_condition": False,
        "pe_interpolation": 2,
    }


RELEASED = Released(
    name="pixart-sigma-xl", size=Size(heads=16, head_dim=72, blocks=(28,), text_dim=4096), text=300
)

LATENTS = {"even": (1, 4, 40, 28), "odd": (1, 4, 42, 26)}  # ComfyUI has no positions for smaller ones
SAMPLES = (sample("pixart-sigma", "PixArtSigma", config, RELEASED, latents=LATENTS),)
