"""SD3 and SD3.5 (comfy/ldm/modules/diffusionmodules/mmdit.py@0.30.0): context and image joined at
attention in every block.

SD3.5 medium attends over the image tokens a second time, alone. The last block returns no context.
"""

from .plan import Blocks, Leave, TokenPlan
from .sample import Config, Released, Size, Tiny, sample

PLAN = TokenPlan(
    streams=("context", "x"),
    blocks=(
        Blocks(
            path="joint_blocks",
            tokens={"context": ("context",), "x": ("x",)},
            positional=("context", "x"),
            self_attention_2="x_block.attn2",
            control="output",
        ),
    ),
    leave=Leave(path="final_layer", stream="x"),
    also_attend_alone=("x",),
)


def config(size: Size) -> Config:
    return {
        "in_channels": 16,
        "out_channels": 16,
        "depth": size.heads,
        "input_size": None,
        "adm_in_channels": size.pooled_dim,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": size.text_dim, "out_features": size.hidden},
        },
        "num_patches": 1024,
        "pos_embed_max_size": 32,
    }


def medium_config(size: Size) -> Config:
    """Normalised q and k, and a second self-attention in the first blocks."""
    return {**config(size), "qk_norm": "rms", "x_block_self_attn_layers": [0, 1]}


def released_square(name: str, heads: int, side: int, changes: Config, title: str = "") -> Released:
    """``side``: tokens along an edge of the largest image that has positions."""
    size = Size(heads=heads, head_dim=64, blocks=(heads,), text_dim=4096, pooled_dim=2048)
    changes = {"pos_embed_max_size": side, "num_patches": side * side, **changes}
    return Released(name=name, size=size, text=154, changes=changes, title=title)


LARGE = released_square("sd3.5-large", 38, 192, {"qk_norm": "rms"}, "SD3.5 large")
MEDIUM = released_square("sd3.5-medium", 24, 384, {"x_block_self_attn_layers": list(range(13))})
TINY = Tiny(head_dim=64, blocks=())  # as many blocks as heads, and heads of 64
TINY_MEDIUM = Tiny(heads=(3,), head_dim=64, blocks=())

SAMPLES = (
    sample("sd3", "SD3", config, LARGE, tiny=TINY, stands_for=("Blocks.positional",)),
    sample(
        "sd3.5-medium",
        "SD3",
        medium_config,
        MEDIUM,
        tiny=TINY_MEDIUM,
        stands_for=("also_attend_alone",),
    ),
)
