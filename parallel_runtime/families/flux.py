"""Flux 1 and Flux 2 (comfy/ldm/flux/model.py@0.30.0): text and image apart in the double blocks,
joined in the single ones.

Files are laid out as black-forest-labs' flux1 files, which ComfyUI detects
(comfy/model_detection.py@0.30.0: heads = hidden / 128).
"""

from __future__ import annotations

from typing import Any

import torch

from .plan import Along, Blocks, Leave, Ranges, TokenPlan
from .sample import Config, Family, FileForm, Form, Masks, Released, Sample, Shapes, Size

JOINT = ("txt", "img")

PLAN = TokenPlan(
    family="flux",
    models=("comfy.ldm.flux.model:Flux",),
    streams=JOINT,
    blocks=(
        Blocks(
            path="double_blocks",
            tokens={"txt": ("txt",), "img": ("img",)},
            returns=("img", "txt"),
            control="input",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims_img", streams=("img",)),),  # that of the text is one range, of all of it
        ),
        Blocks(
            path="single_blocks",
            tokens={"x": JOINT},
            control="output",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims", streams=("img",), after="txt"),),
        ),
    ),
    leave=Leave(path="final_layer", stream="img"),  # the rows that have another timestep are dropped behind it
    positions=("pe_embedder",),
)

AXES = {16: (4, 6, 6), 32: (8, 12, 12), 64: (8, 28, 28), 128: (16, 56, 56)}  # head size -> position axes; files have the last


def tiny(heads: int) -> Size:
    return Size(heads=heads, head_dim=16, blocks=(2, 2))


def config(size: Size) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "image_model": "flux",
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
        "image_model": "flux2",
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


def references(latent: torch.Tensor) -> dict[str, Any]:
    """The extras that an edit adds to a prompt: a picture, with a timestep of its own."""
    picture = torch.randn(1, 128, 4, 3, generator=torch.Generator().manual_seed(4))
    return {"reference_latents": [picture], "reference_latents_method": "index_timestep_zero"}


def shapes(config: Config) -> Shapes:
    """Every tensor of the Flux 1 that ``config`` describes, under its name in a file."""
    hidden, head_dim = config["hidden_size"], sum(config["axes_dim"])
    mlp = int(hidden * config["mlp_ratio"])
    pixels = config["in_channels"] * config["patch_size"] ** 2
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        shapes[f"{name}.weight"] = (fan_out, fan_in)
        shapes[f"{name}.bias"] = (fan_out,)

    def qk_norm(name: str) -> None:
        shapes[f"{name}.query_norm.scale"] = (head_dim,)
        shapes[f"{name}.key_norm.scale"] = (head_dim,)

    linear("img_in", pixels, hidden)
    linear("txt_in", config["context_in_dim"], hidden)
    embedders = {"time_in": 256, "vector_in": config["vec_in_dim"]} | ({"guidance_in": 256} if config["guidance_embed"] else {})
    for name, width in embedders.items():
        linear(f"{name}.in_layer", width, hidden)
        linear(f"{name}.out_layer", hidden, hidden)
    for block in range(config["depth"]):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            linear(f"{prefix}_mod.lin", hidden, 6 * hidden)
            linear(f"{prefix}_attn.qkv", hidden, 3 * hidden)
            qk_norm(f"{prefix}_attn.norm")
            linear(f"{prefix}_attn.proj", hidden, hidden)
            linear(f"{prefix}_mlp.0", hidden, mlp)
            linear(f"{prefix}_mlp.2", mlp, hidden)
    for block in range(config["depth_single_blocks"]):
        prefix = f"single_blocks.{block}"
        linear(f"{prefix}.modulation.lin", hidden, 3 * hidden)
        linear(f"{prefix}.linear1", hidden, 3 * hidden + mlp)
        qk_norm(f"{prefix}.norm")
        linear(f"{prefix}.linear2", hidden + mlp, hidden)
    linear("final_layer.adaLN_modulation.1", hidden, 2 * hidden)
    linear("final_layer.linear", hidden, pixels)
    return shapes


FILE = FileForm(shapes=shapes, head_dim=128, lora_targets=("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "linear1", "linear2"))

DEV = Released(
    name="flux1-dev",
    size=Size(heads=24, head_dim=128, blocks=(19, 38), text_dim=4096, pooled_dim=768),
    text=512,
    changes={"guidance_embed": True},
)
DEV_2 = Released(
    name="flux2-dev",
    size=Size(heads=48, head_dim=128, blocks=(8, 48), text_dim=15360),
    text=512,
    changes={"guidance_embed": True, "axes_dim": [32, 32, 32, 32]},
)

FLUX = Family(
    plans=(PLAN,),
    samples=(
        Sample(
            name="flux",
            form=Form(config_class="FluxSchnell", config=config, file=FILE, released=(DEV,)),
            heads=(12, 5),  # 12 divides by every world size that parity tries, 5 by none
            tiny=tiny,
            larger={
                "demo": Size(heads=4, head_dim=128, blocks=(4, 20)),
                "bench": Size(heads=2, head_dim=128, blocks=(8, 16)),
                "deep": Size(heads=2, head_dim=64, blocks=(19, 38), text_dim=4096),
                "large": Size(heads=16, head_dim=128, blocks=(2, 16)),
            },
            latents={"even": (1, 16, 16, 12), "odd": (1, 16, 13, 18)},
            masks=Masks(),
            stands_for=("joined streams", "masks", "bf16"),
        ),
        Sample(
            name="flux2",
            form=Form(config_class="Flux2", config=config_2, released=(DEV_2,)),
            heads=(5,),
            tiny=tiny,
            latents={"even": (1, 128, 8, 6), "odd": (1, 128, 5, 7)},
            masks=Masks(side=1, text=512),
            stands_for=("Ranges",),
        ),
        Sample(
            name="flux2-edit",
            form=Form(config_class="Flux2", config=config_2),
            heads=(5,),
            tiny=tiny,
            latents={"even": (1, 128, 8, 6), "odd": (1, 128, 5, 7)},
            prompt_extras=references,
        ),
    ),
)
