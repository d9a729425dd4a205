"""Wan Dancer (comfy/ldm/wan/model_wandancer.py@0.30.0): behind some blocks, each eighth of a frame
attends to one token of music. Videos of other than 30 frames per second leave by a head of their
own.
"""

from dataclasses import replace
from typing import Any

import torch

from . import wan
from .plan import Frames, Insert
from .sample import Config, Size, sample

MUSIC = Insert(path="music_injector", frames=Frames(stream="img", each={"audio_emb": 1}, count="seq_len"))
PLAN = replace(wan.with_insert(MUSIC), leave=replace(wan.PLAN.leave, instead="head_global"))


def config(size: Size) -> Config:
    music = {"audio_inject_layers": [0, 2], "music_dim": 32, "music_heads": 2, "music_latent_dim": 32}
    return {**wan.config(size, extra_channels=20, model_type="wandancer"), **music}


def music(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the Dancer nodes: music, an image, and a reference. An image is made for 30
    frames per second, a video for 24.
    """
    generator = torch.Generator().manual_seed(12)
    extras = wan.first_frame(latent)
    return {
        **extras,
        "clip_vision_output_ref": extras["clip_vision_output"],
        "audio_embed": torch.randn(1, 20, 35, generator=generator),
        "audio_inject_scale": 0.5,
        "fps": 30.0 if latent.shape[2] == 1 else 24.0,
    }


RELEASED = wan.released(
    "wan2.2-dancer-14b",
    audio_inject_layers=[0, 4, 8, 12, 16, 20, 24, 27],
    music_dim=256,
    music_heads=4,
    music_latent_dim=256,
)
INPUTS = {"latents": {"even": (1, 16, 2, 8, 8), "odd": (1, 16, 1, 16, 12)}, "prompt_extras": music}
SAMPLES = (sample("wan-dancer", "WAN22_WanDancer", config, RELEASED, **INPUTS),)
