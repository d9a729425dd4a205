"""Flux 1 and Flux 2 (comfy/ldm/flux/model.py@0.30.0): text and image apart in the double blocks,
joined in the single ones.
"""

from dataclasses import replace

from .plan import Along, BlockPatch, Blocks, Leave, Ranges, TokenPlan
from .sample import Config, FileForm, Form, Masks, Released, Sample, Size, Tiny, random_extras, sample

JOINT = ("txt", "img")
CACHE = "comfy_extras.nodes_flux"
REFERENCES_KEPT = (
    BlockPatch(code=f"{CACHE}:KV_Attn_Input", instead="keep references"),
    BlockPatch(code=f"{CACHE}:FluxKVCache.execute.<locals>.model_input_patch", instead="nothing"),
)

ROPE = (Along(arg="pe", dim=2, streams=JOINT),)
DOUBLE = Blocks(
    path="double_blocks",
    tokens={"txt": ("txt",), "img": ("img",)},
    returns=("img", "txt"),
    control="input",
    along=ROPE,
)
SINGLE = Blocks(path="single_blocks", tokens={"x": JOINT}, control="output", along=ROPE)
# That of the text is one range, of all of it
IMAGE_RANGES = (Ranges(arg="modulation_dims_img", streams=("img",)),)

PLAN = TokenPlan(
    streams=JOINT,
    blocks=(
        replace(DOUBLE, ranges=IMAGE_RANGES, patches=REFERENCES_KEPT),
        replace(SINGLE, ranges=(Ranges(arg="modulation_dims", streams=("img",), after="txt"),)),
    ),
    # The rows that have another timestep are dropped behind it
    leave=Leave(path="final_layer", stream="img"),
)

# Head size -> position axes; files have the last
AXES = {16: (4, 6, 6), 32: (8, 12, 12), 64: (8, 28, 28), 128: (16, 56, 56)}


def config(size: Size) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "hidden_size": size.hidden,
        "num_heads": size.heads,
        "axes_dim": list(AXES[size.head_dim]),
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "context_in_dim": size.text_dim,
        "vec_in_dim": size.pooled_dim,
        "guidance_embed": False,
        "mlp_ratio": 4.0,
        "theta": 10000,
        "qkv_bias": True,
        "txt_ids_dims": [],
    }


def guided_config(size: Size) -> Config:
    """The dev form, to be built with the config class ``Flux``."""
    return {**config(size), "guidance_embed": True}


def config_2(size: Size) -> Config:
    """Flux 2: modulation shared by all blocks, gated MLPs, no biases, four position axes, text
    padded to 512 tokens.
    """
    return {
        **config(size),
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "axes_dim": [4, 4, 4, 4],
        "vec_in_dim": None,
        "mlp_ratio": 3.0,
        "theta": 2000,
        "qkv_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "ops_bias": False,
        "txt_ids_dims": [3],
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }


LARGE = Size(heads=24, head_dim=128, blocks=(19, 38), text_dim=4096, pooled_dim=768)
LARGE_2 = Size(heads=48, head_dim=128, blocks=(8, 48), text_dim=15360)
DEV = Released(name="flux1-dev", size=LARGE, text=512, changes={"guidance_embed": True}, title="FLUX.1-dev")
DEV_2 = Released(
    name="flux2-dev", size=LARGE_2, text=512, changes={"guidance_embed": True, "axes_dim": [32, 32, 32, 32]}
)

# a picture with a timestep of its own
REFERENCE = random_extras(reference_latents=[(1, 128, 4, 3)], reference_latents_method="index_timestep_zero")
INPUTS_2 = {"tiny": Tiny(blocks=(2, 2)), "latents": {"even": (1, 128, 8, 6), "odd": (1, 128, 5, 7)}}
FILE = FileForm(
    head_dim=128,
    lora_targets=("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "linear1", "linear2"),
    named=lambda name: name.replace("_norm.weight", "_norm.scale"),
)

SAMPLES = (
    Sample(
        name="flux",
        form=Form(config_class="FluxSchnell", config=config, file=FILE, released=(DEV,)),
        # 12 divides by every world size that parity tries, 5 by none
        tiny=Tiny(heads=(12, 5), blocks=(2, 2)),
        larger={
            "demo": Size(heads=4, head_dim=128, blocks=(4, 20)),
            "bench": Size(heads=2, head_dim=128, blocks=(8, 16)),
            "deep": Size(heads=2, head_dim=64, blocks=(19, 38), text_dim=4096),
            "large": Size(heads=16, head_dim=128, blocks=(2, 16)),
        },
        masks=Masks(),
        stands_for=("joined streams", "masks", "bf16"),
    ),
    sample(
        "flux2",
        "Flux2",
        config_2,
        DEV_2,
        **INPUTS_2,
        masks=Masks(side=1, text=512),
        stands_for=("Ranges",),
    ),
    sample("flux2-edit", "Flux2", config_2, **INPUTS_2, prompt_extras=REFERENCE),
)
