"""Ernie-Image (comfy/ldm/ernie/model.py@0.30.0): image and text in one sequence, one token per
latent pixel. Its attention calls ComfyUI's without ``transformer_options``.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import PIXELS, Config, Released, Size, sample

JOINT = ("img", "txt")

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        Blocks(
            path="layers",
            tokens={"x": JOINT},
            lengths={"img": "x_embedder"},
            along=(Along(arg="rotary_pos_emb", dim=1, streams=JOINT),),
            without_options="self_attention",
        ),
    ),
    leave=Leave(path="final_linear", stream="img", streams=JOINT),
)


def config(size: Size) -> Config:
    return {
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_layers": size.blocks[0],
        "ffn_hidden_size": 96,
        "text_in_dim": size.text_dim,
        "rope_axes_dim": (4, 6, 6),
    }


RELEASED = Released(
    name="ernie-image-8b",
    size=Size(heads=32, head_dim=128, blocks=(36,), text_dim=3072),
    text=256,
    changes={"ffn_hidden_size": 12288, "rope_axes_dim": (32, 48, 48)},
)

INPUTS = {"latents": PIXELS, "stands_for": ("Blocks.without_options",)}
SAMPLES = (sample("ernie", "ErnieImage", config, RELEASED, **INPUTS),)
