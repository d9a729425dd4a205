"""Wan 2.1 and 2.2 with a camera's path (comfy/ldm/wan/model.py:CameraWanModel@0.30.0): as Wan, but
one timestep for all frames.
"""

from functools import partial
from typing import Any

import torch

from . import wan
from .plan import Along, Blocks, Leave, TokenPlan
from .sample import Family, Form, Sample

PLAN = TokenPlan(
    family="wan_camera",
    models=("comfy.ldm.wan.model:CameraWanModel",),
    streams=wan.IMG,
    blocks=(
        Blocks(
            path="blocks",
            tokens={"x": wan.IMG},
            along=(Along(arg="freqs", dim=1, streams=wan.IMG),),
            local=("cross_attn",),
        ),
    ),
    leave=Leave(path="head", stream="img"),
    positions=wan.PLAN.positions,
)


def path(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the camera node: a ray for each pixel of the video, six numbers of four frames
    to one of the latent.
    """
    frames, height, width = latent.shape[2:]
    generator = torch.Generator().manual_seed(5)
    rays = torch.randn(1, 24, frames, 8 * (height + height % 2), 8 * width, generator=generator)
    return {"camera_conditions": rays, **wan.first_frame(latent)}


RELEASED = (wan.released("wan2.1-fun-camera-14b", 40, 40, 13824, (832, 480, 81)),)

WAN_CAMERA = Family(
    plans=(PLAN,),
    samples=(
        Sample(
            name="wan-camera",
            form=Form(
                config_class="WAN21_Camera",
                config=partial(wan.config, extra_channels=16, model_type="camera"),
                released=RELEASED,
            ),
            latents=wan.latents(16),
            prompt_extras=path,
        ),
    ),
)
