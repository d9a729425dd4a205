"""SCAIL and SCAIL-2 (comfy/ldm/wan/model.py:SCAILWanModel@0.30.0): Wan whose video tokens stand
between the tokens of references and the tokens of a pose.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import wan
from .sample import VIDEO, Sample, sample

PLAN = replace(
    wan.PLAN,
)


def scail_extras(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the SCAIL node: two references, and a pose at half the resolution."""
    generator = torch.Generator().manual_seed(6)
    batch, channels, frames, height, width = latent.shape
    one, other = torch.randn(2, batch, channels, 1, height, width, generator=generator)
    return {
        "reference_latents": [one, other],
        "pose_video_latent": torch.randn(
            batch, channels, frames, height // 2, width // 2, generator=generator
        ),
        "clip_vision_output": wan.first_frame(latent)["clip_vision_output"],
    }


def masked_pose(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the SCAIL-2 node: an identity mask for each reference and each frame too."""
    generator = torch.Generator().manual_seed(7)
    extras = scail_extras(latent)
    frames, height, width = latent.shape[2:]
    pose_frames = extras["pose_video_latent"].shape[2:]
    masks = torch.rand(1, 2 + frames, 28, height, width, generator=generator).round()
    driving = torch.rand(1, pose_frames[0], 28, *pose_frames[1:], generator=generator).round()
    return {**extras, "ref_mask_28ch": masks, "driving_mask_28ch": driving, "ref_mask_flag": False}


def scail(model_type: str, config_class: str, extras: Any) -> Sample:
    # Beside the latent's channels: which frames are given
    config = partial(wan.config, extra_channels=4, model_type=model_type)
    released = wan.released(f"{model_type}-14b")
    return sample(f"wan-{model_type}", config_class, config, released, latents=VIDEO, prompt_extras=extras)


SAMPLES = (scail("scail", "WAN21_SCAIL", scail_extras), scail("scail2", "WAN21_SCAIL2", masked_pose))
