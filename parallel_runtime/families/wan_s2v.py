"""Wan S2V (comfy/ldm/wan/model.py:WanModel_S2V@0.30.0): behind some blocks, tokens of the video
attend to the speech of their own frame. Tokens of a reference and of the motion before come last.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import wan
from .plan import Frames, Insert
from .sample import Config, Size, sample

SPEECH = Insert(
    path="audio_injector",
    frames=Frames(stream="img", each={"audio_emb": 1, "audio_emb_global": 1}, count="seq_len"),
)
PLAN = wan.with_insert(SPEECH)


def config(size: Size) -> Config:
    return {**wan.config(size, model_type="s2v"), "audio_dim": 24, "audio_inject_layers": [0, 2, 4]}


def speech(latent: torch.Tensor, audio_dim: int = 24) -> dict[str, Any]:
    """The extras of the S2V node: four embeddings of speech for each frame, a reference, a pose,
    and the video before.
    """
    generator = torch.Generator().manual_seed(10)
    _, channels, frames, height, width = latent.shape
    reference, *motion = torch.randn(20, 1, channels, 1, height, width, generator=generator)
    return {
        "audio_embed": torch.randn(1, 25, audio_dim, 4 * frames, generator=generator),
        "reference_latents": [reference],
        "reference_motion": torch.cat(motion, 2),
        "control_video": torch.randn(latent.shape, generator=generator),
    }


INJECTED = [0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39]
LARGE = wan.released("wan2.2-s2v-14b", extent=(832, 480, 77), audio_dim=1024, audio_inject_layers=INJECTED)
RELEASED = replace(LARGE, extras=partial(speech, audio_dim=1024))
INPUTS = {"latents": {"even": (1, 16, 3, 8, 8), "odd": (1, 16, 3, 10, 10)}, "prompt_extras": speech}
SAMPLES = (sample("wan-s2v", "WAN22_S2V", config, RELEASED, **INPUTS),)
