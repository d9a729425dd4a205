"""Kandinsky 6, video with audio (comfy/ldm/kandinsky6/model.py@4ab48ceb): video tokens in the
visual blocks, text through cross-attention.

Every rank has all audio tokens, and computes them whole; they attend to video tokens that are cut.
Behind the blocks the video takes its shape again, so its tokens leave there.
"""

import math
from typing import Any

import torch

from .plan import Along, Blocks, Leave, Together, TokenPlan
from .sample import Config, Extent, Released, Size, TokenParts, sample

VIDEO = ("visual_embed",)

PLAN = TokenPlan(
    streams=VIDEO,
    blocks=(
        Blocks(
            path="visual_blocks",
            tokens={"visual_embed": VIDEO},
            returns=("visual_embed", "audio_embed"),
            along=(Along(arg="visual_rope", dim=1, streams=VIDEO),),
            local=(
                *("videoT.cross_attention", "va_cross_attention"),
                *("audioT.self_attention", "audioT.cross_attention"),
            ),
            whole_queries=("av_cross_attention",),
        ),
    ),
    leave=Leave(path="visual_blocks", stream="visual_embed"),
    together=Together(always="its audio, which attends to the whole video"),
)


def config(size: Size) -> Config:
    """The audio has three heads."""
    widths = {"model_dim": size.hidden, "ff_dim": 96, "time_dim": 32, "axes_dims": (4, 6, 6)}
    audio = {"model_dim_a": 3 * size.head_dim, "ff_dim_a": 64, "time_dim_a": 32, "head_dim_a": size.head_dim}
    return {
        "image_model": "kandinsky6",
        "in_text_dim": size.text_dim,
        "in_text_dim2": size.pooled_dim,
        **widths,
        **audio,
        "num_text_blocks": 2,
        "num_visual_blocks": size.blocks[0],
    }


def first_picture(latent: Any) -> dict[str, Any]:
    """A picture, which the model puts behind the last frame, and takes off again."""
    video = latent.unbind()[0]
    shape = (*video.shape[:2], 1, *video.shape[3:])
    return {"k6_reference": torch.randn(shape, generator=torch.Generator().manual_seed(4))}


def video_and_sound(extent: Extent) -> tuple[tuple[int, ...], ...]:
    width, height, frames = extent
    sound = math.ceil(frames / 24 * 44100 / 1024)
    return (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8), (1, sound, 40)


LARGE = Size(heads=28, head_dim=64, blocks=(32,), text_dim=3584, pooled_dim=768)
VIDEO_WIDTHS = {"axes_dims": (16, 24, 24), "ff_dim": 7168, "time_dim": 512}
AUDIO_WIDTHS = {"model_dim_a": 896, "ff_dim_a": 3584, "time_dim_a": 512, "head_dim_a": 64}
RELEASED = Released(
    name="kandinsky6-lite",
    size=LARGE,
    text=512,
    extent=(864, 480, 121),
    changes={**VIDEO_WIDTHS, **AUDIO_WIDTHS},
    latents=video_and_sound,
    cut=TokenParts(chunks=(2, 4)),
)
INPUTS = {
    "since": "0.47.0",
    "latents": {"even": ((1, 16, 3, 8, 6), (1, 5, 40)), "odd": ((1, 16, 3, 5, 6), (1, 4, 40))},
}

SAMPLES = (
    sample("kandinsky6", "Kandinsky6", config, RELEASED, **INPUTS),
    sample("kandinsky6-i2v", "Kandinsky6", config, prompt_extras=first_picture, **INPUTS),
)
AHEAD = "ComfyUI's 4ab48ceb over 0.33.0"
