"""Nodes of other packs that ComfyUI's own templates use, by what they give: the packs need not be
installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.samplers
import torch

from .text import WRITTEN

Outputs = tuple[Any, ...]
SCHEDULER = "beta57"
PICTURE: dict[str, Any] = {"required": {"image": ("IMAGE",)}}


class WithoutAlpha:
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "run", "PipeMesh/templates"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return PICTURE

    def run(self, image: torch.Tensor) -> Outputs:
        return (image[..., :3],)


class SizeAndCount:
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE", "INT", "INT", "INT"), "run", "PipeMesh/templates"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return PICTURE

    def run(self, image: torch.Tensor) -> Outputs:
        return image, image.shape[2], image.shape[1], image.shape[0]


class Describe:
    RETURN_TYPES, FUNCTION, CATEGORY = ("STRING",), "run", "PipeMesh/templates"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "optional": {"image": ("IMAGE",), "video": ("IMAGE",)}}

    def run(self, **_: Any) -> Outputs:
        return (WRITTEN,)


def add_schedulers() -> None:
    """The one of another pack's that a template asks for: a beta distribution's quantiles."""
    made = comfy.samplers.SchedulerHandler(partial(comfy.samplers.beta_scheduler, alpha=0.5, beta=0.7))
    comfy.samplers.SCHEDULER_HANDLERS[SCHEDULER] = made
    comfy.samplers.SCHEDULER_NAMES.append(SCHEDULER)


FOREIGN = {"ImageRemoveAlpha+": WithoutAlpha, "GetImageSizeAndCount": SizeAndCount, "AILab_QwenVL": Describe}
