"""Wan Animate (comfy/ldm/wan/model_animate.py@0.30.0): behind every fifth block, tokens attend to
the motion of the face in their own frame.
"""

from functools import partial
from typing import Any

import torch

from . import wan
from .plan import Frames, Insert
from .sample import sample

FACE = Insert(path="face_adapter.fuser_blocks.*", frames=Frames(stream="img", each={"motion_vec": 1}))
PLAN = wan.with_insert(FACE)


def animate_extras(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the Animate node but for the face, whose pictures take seconds to look at."""
    generator = torch.Generator().manual_seed(13)
    return {
        **wan.first_frame(latent),
        "pose_video_latent": torch.randn(latent[:, :, 1:].shape, generator=generator),
    }


CONFIG = partial(wan.config, extra_channels=20, model_type="animate")
RELEASED = wan.released("wan2.2-animate-14b", extent=(832, 480, 77))
INPUTS = {"latents": {"even": (1, 16, 3, 8, 6), "odd": (1, 16, 3, 6, 6)}, "prompt_extras": animate_extras}
SAMPLES = (sample("wan-animate", "WAN22_Animate", CONFIG, RELEASED, **INPUTS),)
