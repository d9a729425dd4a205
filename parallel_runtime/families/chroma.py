"""Chroma (comfy/ldm/chroma/model.py@0.30.0): the blocks of Flux, their modulation computed once for
all of them.
"""

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Config, Family, Form, Masks, Released, Sample, Size

JOINT = ("txt", "img")
ROPE = (Along(arg="pe", dim=2, streams=JOINT),)

PLAN = TokenPlan(
    family="chroma",
    models=("comfy.ldm.chroma.model:Chroma",),
    streams=JOINT,
    blocks=(
        Blocks(path="double_blocks", tokens={"txt": ("txt",), "img": ("img",)}, returns=("img", "txt"), control="input", along=ROPE),
        Blocks(path="single_blocks", tokens={"x": JOINT}, control="output", along=ROPE),
    ),
    leave=Leave(path="final_layer", stream="img"),
    positions=("pe_embedder",),
)


def tiny(heads: int) -> Size:
    return Size(heads=heads, head_dim=16, blocks=(2, 2))


def config(size: Size) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "context_in_dim": size.text_dim,
        "hidden_size": size.hidden,
        "mlp_ratio": 4.0,
        "num_heads": size.heads,
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "axes_dim": [4, 6, 6],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "in_dim": 64,
        "out_dim": size.hidden,
        "hidden_dim": 48,
        "n_layers": 2,
        "txt_ids_dims": [],
        "vec_in_dim": None,
    }


RELEASED = Released(
    name="chroma1-hd",
    size=Size(heads=24, head_dim=128, blocks=(19, 38), text_dim=4096),
    text=512,
    changes={"axes_dim": [16, 56, 56], "hidden_dim": 5120, "n_layers": 5},
)

CHROMA = Family(
    plans=(PLAN,),
    samples=(
        Sample(
            name="chroma",
            form=Form(config_class="Chroma", config=config, released=(RELEASED,)),
            heads=(5,),
            tiny=tiny,
            latents={"even": (1, 16, 16, 12), "odd": (1, 16, 13, 18)},
            masks=Masks(),
        ),
    ),
)
