"""HunyuanVideo 1 and 1.5, Hunyuan-Image 2.1 (comfy/ldm/hunyuan_video/model.py@0.30.0): blocks as
Flux has them, with the text refined before them.

A given frame has a timestep of its own; single blocks count its tokens from the text's first one
on. A reference's tokens stand before the image's and are cut off behind the blocks, by how many
they are in all: the rows leave there.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .plan import Along, Blocks, Leave, Ranges, TokenPlan
from .sample import Config, Family, Form, Masks, Released, Sample, Size, Tiny, random_extras

JOINT = ("txt", "img")

PLAN = TokenPlan(
    family="hunyuan-video",
    models=("comfy.ldm.hunyuan_video.model:HunyuanVideo",),
    streams=JOINT,
    blocks=(
        Blocks(
            path="double_blocks",
            tokens={"txt": ("txt",), "img": ("img",)},
            returns=("img", "txt"),
            control="input",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims_img", streams=("img",)),),
        ),
        Blocks(
            path="single_blocks",
            tokens={"x": JOINT},
            control="output",
            along=(Along(arg="pe", dim=2, streams=JOINT),),
            ranges=(Ranges(arg="modulation_dims", streams=JOINT),),
        ),
    ),
    leave=Leave(path="single_blocks", stream="img"),
    positions=("pe_embedder",),
)


def config(size: Size, **form: Any) -> Config:
    double_blocks, single_blocks = size.blocks
    return {
        "image_model": "hunyuan_video",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": size.pooled_dim,
        "context_in_dim": size.text_dim,
        "hidden_size": size.hidden,
        "mlp_ratio": 4.0,
        "num_heads": size.heads,
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "axes_dim": [4, 6, 6],
        "theta": 256,
        "patch_size": [1, 2, 2],
        "qkv_bias": True,
        "guidance_embed": True,
        "byt5": False,
        "meanflow": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
        **form,
    }


def reference(latent: torch.Tensor) -> dict[str, Any]:
    return {"ref_latent": torch.randn(latent[:, :, :1].shape, generator=torch.Generator().manual_seed(4))}


# The words to be written, read by a second text encoder
glyphs = random_extras(conditioning_byt5small=(1, 5, 1472))


def picture(latent: torch.Tensor) -> dict[str, Any]:
    """The first frame as latent channels, and as a CLIP vision embedding."""
    generator = torch.Generator().manual_seed(5)
    seen = SimpleNamespace(last_hidden_state=torch.randn(1, 7, 1152, generator=generator))
    return {
        **glyphs(latent),
        "concat_latent_image": torch.randn(latent.shape, generator=generator),
        "clip_vision_output": seen,
    }


GUIDED = random_extras(guiding_frame_index=0)
VIDEO = {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 10)}
NEXT = {
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
}
NEXT |= {"byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True}
IMAGE = {
    "in_channels": 64,
    "out_channels": 64,
    "patch_size": [1, 1],
    "axes_dim": [8, 8],
    "vec_in_dim": None,
    "byt5": True,
    "meanflow": True,
}


RELEASED = Released(
    name="hunyuan-video-13b",
    size=Size(heads=24, head_dim=128, blocks=(20, 40), text_dim=4096, pooled_dim=768),
    text=256,
    extent=(1280, 720, 129),
    changes={"axes_dim": [16, 56, 56]},
)


def sample(
    name: str,
    config_class: str,
    latents: dict[str, tuple[int, ...]],
    form: Config,
    released: tuple[Released, ...] = (),
    **more: Any,
) -> Sample:
    made = Form(config_class=config_class, config=partial(config, **form), released=released)
    return Sample(name=name, form=made, tiny=Tiny(blocks=(2, 2)), latents=latents, **more)


HUNYUAN_VIDEO = Family(
    plans=(PLAN,),
    samples=(
        sample(
            "hunyuan-video",
            "HunyuanVideo",
            VIDEO,
            {},
            (RELEASED,),
            masks=Masks(text_only=True),
            prompt_extras=GUIDED,
        ),
        sample("hunyuan-video-reference", "HunyuanVideo", VIDEO, {}, prompt_extras=reference),
        sample(
            "hunyuan-video-1.5",
            "HunyuanVideo15",
            {"even": (1, 32, 3, 4, 4), "odd": (1, 32, 3, 3, 5)},
            NEXT,
            prompt_extras=picture,
        ),
        sample(
            "hunyuan-image",
            "HunyuanImage21",
            {"even": (1, 64, 8, 6), "odd": (1, 64, 5, 7)},
            IMAGE,
            prompt_extras=glyphs,
        ),
    ),
)
