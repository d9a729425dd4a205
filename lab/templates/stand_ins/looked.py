"""What looks at pictures before anything is sampled (masks, depth, flow, larger pictures), and the
nodes of paid services: answers of the right shape, without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import torch
from torch.nn import functional

from .media import picture, pictures, sound, video
from .text import WRITTEN

Outputs = tuple[Any, ...]
OF_SERVICES = "comfy_api_nodes"
ANSWERS: Mapping[str, Callable[[str], Any]] = {
    "IMAGE": pictures,
    "MASK": lambda name: picture(name)[1],
    "VIDEO": video,
    "AUDIO": sound,
}


def middle_of(images: torch.Tensor) -> torch.Tensor:
    """A mask (B, H, W) of the middle of each picture."""
    batch, height, width = images.shape[:3]
    mask = torch.zeros(batch, height, width)
    mask[:, height // 4 : -height // 4, width // 4 : -width // 4] = 1
    return mask


def detect(image: torch.Tensor, **_: Any) -> Outputs:
    height, width = image.shape[1:3]
    return middle_of(image), [{"x": width // 4, "y": height // 4, "width": width // 2, "height": height // 2}]


def track(images: torch.Tensor, **_: Any) -> Outputs:
    """Two objects: the middle, and a stripe to the left of it."""
    from comfy.ldm.sam3.tracker import pack_masks

    height, width = images.shape[1:3]
    wide = functional.pad(middle_of(images), (0, -width % 8))
    objects = torch.stack((wide, wide.roll(-wide.shape[-1] // 4, -1)), 1)
    return (
        {
            "packed_masks": pack_masks(objects),
            "orig_size": (height, width),
            "n_frames": len(images),
            "scores": [0.9, 0.8],
        },
    )


def painted(width: int, height: int, image: torch.Tensor | None = None, **_: Any) -> Outputs:
    """What a user painted: the middle of a picture."""
    canvas = pictures("painted") if image is None else image
    if image is None:
        canvas = functional.interpolate(canvas.movedim(-1, 1), size=(height, width)).movedim(1, -1)
    return canvas, middle_of(canvas)


def geometry(image: torch.Tensor, **_: Any) -> Outputs:
    return ({"image": image},)


def depth(**given: Any) -> Outputs:
    """Grey where the picture is dark."""
    image = next(value for value in given.values() if isinstance(value, dict) and "image" in value)["image"]
    return (image[..., :3].mean(-1, keepdim=True).expand(*image.shape[:3], 3),)


class Drift(torch.nn.Module):
    """An optical flow to the right, as RAFT gives one: a list of better and better ones."""

    def forward(self, before: torch.Tensor, after: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        flow = torch.zeros_like(before[:, :2])
        flow[:, 0] = 1.5
        return [flow]


def optical_flow(**_: Any) -> Outputs:
    cpu = torch.device("cpu")
    return (comfy.model_patcher.ModelPatcher(Drift(), load_device=cpu, offload_device=cpu),)


class Enlarger:
    """An upscale model that repeats pixels."""

    def __init__(self, scale: int):
        cpu = torch.device("cpu")
        self.scale = scale
        self.patcher = comfy.model_patcher.ModelPatcher(
            torch.nn.Identity(), load_device=cpu, offload_device=cpu
        )

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture.repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2)


def enlarger(model_name: str) -> Outputs:
    return (Enlarger(2 if "x2" in model_name.lower() else 4),)


def nothing(**_: Any) -> Outputs:
    return (SimpleNamespace(),)


def answer(original: type) -> Callable[..., Outputs]:
    """What a node of a paid service gives: by the types of its outputs."""

    def given(**_: Any) -> Outputs:
        types = original.RETURN_TYPES  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(ANSWERS[kind](original.__name__) if kind in ANSWERS else WRITTEN for kind in types)

    return given


LOOKED: Mapping[str, Callable[..., Outputs]] = {
    "SAM3_Detect": detect,
    "SAM3_VideoTrack": track,
    "Painter": painted,
    "LoadDA3Model": nothing,
    "DA3Inference": geometry,
    "DA3Render": depth,
    "LoadMoGeModel": nothing,
    "MoGeInference": geometry,
    "MoGeRender": depth,
    "OpticalFlowLoader": optical_flow,
    "UpscaleModelLoader": enlarger,
}
