"""AuraFlow (comfy/ldm/aura/mmdit.py@0.30.0): text and image apart in the double layers, joined in
the single ones.
"""

from .plan import Blocks, Leave, TokenPlan
from .sample import Config, Released, Size, Tiny, sample

PLAN = TokenPlan(
    streams=("c", "x"),
    blocks=(
        Blocks(path="double_layers", tokens={"c": ("c",), "x": ("x",)}),
        Blocks(path="single_layers", tokens={"cx": ("c", "x")}),
    ),
    leave=Leave(path="final_linear", stream="x"),
)


def config(size: Size) -> Config:
    double_layers, single_layers = size.blocks
    return {
        "dim": size.hidden,
        "n_heads": size.heads,
        "n_double_layers": double_layers,
        "n_layers": double_layers + single_layers,
        "global_conddim": size.hidden,
        "cond_seq_dim": size.text_dim,
        "max_seq": 16 * 16,
    }


RELEASED = Released(
    name="auraflow-0.2",
    size=Size(heads=12, head_dim=256, blocks=(4, 32), text_dim=2048),
    text=256,
    changes={"max_seq": 64 * 64},
)

SAMPLES = (
    sample(
        "auraflow",
        "AuraFlow",
        config,
        RELEASED,
        tiny=Tiny(blocks=(2, 3)),
        latents={"even": (1, 4, 16, 12), "odd": (1, 4, 13, 18)},
    ),
)
