"""Wan 2.1 and 2.2 with a camera's path (comfy/ldm/wan/model.py:CameraWanModel@0.30.0): as Wan, but
one timestep for all frames.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import wan
from .sample import VIDEO, sample

PLAN = replace(wan.ONE_TIMESTEP)


def path(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the camera node: a ray for each pixel of the video, six numbers of four frames
    to one of the latent.
    """
    frames, height, width = latent.shape[2:]
    generator = torch.Generator().manual_seed(5)
    rays = torch.randn(1, 24, frames, 8 * (height + height % 2), 8 * width, generator=generator)
    return {"camera_conditions": rays, **wan.first_frame(latent)}


CONFIG = partial(wan.config, extra_channels=16, model_type="camera")
RELEASED = wan.released("wan2.1-fun-camera-14b")
INPUTS = {"latents": VIDEO, "prompt_extras": path}
SAMPLES = (sample("wan-camera", "WAN21_Camera", CONFIG, RELEASED, **INPUTS),)
