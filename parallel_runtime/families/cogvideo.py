"""CogVideoX 1 and 1.5 (comfy/ldm/cogvideo/model.py@0.30.0): text and video apart in every block,
text first in attention; only the video has positions.
"""

from functools import partial
from typing import Any

import torch

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Config, Family, Form, Released, Sample, Size

IMG = ("img",)

PLAN = TokenPlan(
    family="cogvideo",
    models=("comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel",),
    streams=("txt", "img"),
    blocks=(
        Blocks(
            path="blocks",
            tokens={"hidden_states": IMG, "encoder_hidden_states": ("txt",)},
            along=(Along(arg="image_rotary_emb", dim=0, streams=IMG),),
        ),
    ),
    leave=Leave(path="proj_out", stream="img"),
    patch_size=("patch_size_t", "patch_size", "patch_size"),
)


def tiny(heads: int) -> Size:
    return Size(heads=heads, head_dim=16, blocks=(5,))


def config(size: Size, **form: Any) -> Config:
    return {
        "image_model": "cogvideox",
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "in_channels": 16,
        "out_channels": 16,
        "time_embed_dim": 32,
        "text_embed_dim": size.text_dim,
        "num_layers": size.blocks[0],
        "use_rotary_positional_embeddings": True,
        **form,
    }


def given(latent: torch.Tensor) -> dict[str, Any]:
    """A video to change, and where."""
    shape = (1, 32, *latent.shape[2:])
    return {"concat_latent_image": torch.randn(shape, generator=torch.Generator().manual_seed(4))}


RELEASED = Released(
    name="cogvideox-5b",
    size=Size(heads=48, head_dim=64, blocks=(42,), text_dim=4096),
    text=226,
    extent=(720, 480, 49),
    changes={"time_embed_dim": 512},
)
INPAINT = partial(config, in_channels=48, patch_size_t=2, ofs_embed_dim=32)
sample = partial(Sample, heads=(5,), tiny=tiny, latents={"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 5, 6)})

COGVIDEO = Family(
    plans=(PLAN,),
    samples=(
        sample(name="cogvideox", form=Form(config_class="CogVideoX_T2V", config=config, released=(RELEASED,))),
        sample(name="cogvideox-1.5-inpaint", form=Form(config_class="CogVideoX_Inpaint", config=INPAINT), prompt_extras=given),
    ),
)
