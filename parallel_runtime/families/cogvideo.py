"""CogVideoX 1 and 1.5 (comfy/ldm/cogvideo/model.py@0.30.0): text and video apart in every block,
text first in attention; only the video has positions.
"""

from functools import partial
from typing import Any

from .plan import Along, Blocks, Leave, TokenPlan
from .sample import VIDEO, Config, Released, Size, random_extras, sample

IMG = ("img",)

PLAN = TokenPlan(
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


def config(size: Size, **form: Any) -> Config:
    return {
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "in_channels": 16,
        "time_embed_dim": 32,
        "text_embed_dim": size.text_dim,
        "num_layers": size.blocks[0],
        "use_rotary_positional_embeddings": True,
        **form,
    }


LARGE = Size(heads=48, head_dim=64, blocks=(42,), text_dim=4096)
RELEASED = Released(
    name="cogvideox-5b", size=LARGE, text=226, extent=(720, 480, 49), changes={"time_embed_dim": 512}
)
GIVEN = random_extras(concat_latent_image=(1, 32, ...))  # a video to change, and where
INPAINT = partial(config, in_channels=48, patch_size_t=2, ofs_embed_dim=32)

SAMPLES = (
    sample("cogvideox", "CogVideoX_T2V", config, RELEASED, latents=VIDEO),
    sample("cogvideox-1.5-inpaint", "CogVideoX_Inpaint", INPAINT, latents=VIDEO, prompt_extras=GIVEN),
)
