"""Wan Animate 2 (comfy/ldm/wan/model_animate2.py@0.33.0): a pose's tokens go through the same
blocks, and tokens of the video look at the pose of their own frame. The first frame is a reference.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import wan
from .plan import Along, Boundary, BranchCache, BranchTokens
from .sample import VIDEO, Form, Sample

MODULE = "comfy.ldm.wan.model_animate2"
KEPT = BranchCache(
    node="WanAnimate2Cache",
    option="animate2_cache",
    cache=f"{MODULE}:PoseBranchCache",
    entry="kv_from_input",
    tokens="x_pose",
)
POSE = BranchTokens(
    entry="forward_pose",
    stream="pose",
    keys=("k_pose", "v_pose"),
    frame="hw",
    counted_by="patch_embedding",
    along=(Along(arg="freqs", dim=1, streams=("pose",)),),
    kept=KEPT,
)
HW = Boundary(arg="hw", streams=wan.IMG)
PLAN = replace(
    wan.PLAN,
    streams=(*wan.IMG, "pose"),
    blocks=(replace(wan.BLOCKS, entry="forward_gen", branch=POSE, ranges=(HW,), patches=(), points={}),),
)


def driven(latent: torch.Tensor) -> dict[str, Any]:
    """The extras of the Animate 2 node: a pose for each frame behind the reference's; its text."""
    generator = torch.Generator().manual_seed(14)
    extras = {"pose_video_latent": torch.randn(latent[:, :, 1:].shape, generator=generator)}
    extras["cross_attn_pose"] = torch.randn(1, 9, 64, generator=generator)
    return {**wan.first_frame(latent), **extras, "pose_strength": 0.7, "reference_strength": 1.3}


FORM = Form(config_class="WAN_Animate2", config=partial(wan.config, extra_channels=20, model_type="animate2"))
ANIMATE2 = Sample(name="wan-animate2", form=FORM, latents=VIDEO, prompt_extras=driven, since="0.33.0")
CACHED = replace(ANIMATE2, name="wan-animate2-cached", form=replace(FORM, keeps=KEPT))
SAMPLES = (ANIMATE2, CACHED)
UNRELEASED = {f"{MODULE}:WanAnimate2Model": "its blocks are called twice, which a dry run does not count"}
