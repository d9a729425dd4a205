"""Transformers of ComfyUI's that have no token plan, and why. Groups of one rank each compute whole
images of them. If these images would differ from one GPU's, the model stays on one GPU.

Nobody has examined a class that stands neither here nor in a plan: its first evaluation is compared
(``client/groups.py``), and its modules are searched for kept state and random numbers
(``methods/whole_forward.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from .plan import Leave, TokenPlan

NOT_YET = "no plan has been written yet"
UNET = "a UNet: its convolutions look at neighbouring pixels, and its skips cross all blocks"
NO_SAMPLER = "it makes no image or video"
# Models of newer ComfyUIs whose code could not be looked at
NOT_AT_HAND = "FLUX.3 Klein, MOSS-Image and MiniMax-H3-Image"

WITHOUT_PLAN: Mapping[str, str] = {
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel": UNET,
    "comfy.ldm.cascade.stage_b:StageB": UNET,
    "comfy.ldm.cascade.stage_c:StageC": UNET,
    "comfy.ldm.ace.model:ACEStepTransformer2DModel": "linear attention, and convolutions between tokens",
    "comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel": (
        "every other block draws a window of neighbours over the tokens it has"
    ),
    "comfy.ldm.hydit.models:HunYuanDiT": "skips between its first and its last blocks",
}
HALVES = "it exchanges the halves of a batch, and takes them for its two prompts"
ON_ONE_GPU: Mapping[str, str] = {
    "comfy.ldm.wan.ar_model:CausalWanModel": "its sampler fills a cache of keys and values frame by frame",
    "comfy.ldm.seedvr.model:NaDiT": HALVES,
    "comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain": HALVES,
    "comfy.ldm.trellis2.model:Trellis2": "it tells the objects of a batch by their place in one list",
    "comfy.ldm.cosmos.model:GeneralDIT": "it is given an object that is no plain data",
    "comfy.ldm.depth_anything_3.model:DepthAnything3Net": NO_SAMPLER,
    "comfy.ldm.rt_detr.rtdetr_v4:RTv4": NO_SAMPLER,
    "comfy.ldm.sam3.detector:SAM3Model": NO_SAMPLER,
}
# Layers by which a UNet takes the rows of a batch for the frames of one video
OF_FRAMES = (
    "comfy.ldm.modules.attention:SpatialVideoTransformer",
    "comfy.ldm.modules.diffusionmodules.openaimodel:VideoResBlock",
)
FRAMES_ALONE = (
    "The rows of this batch are the frames of one video, which the model computes together, and there is no"
    " other prompt for another GPU: sample with a cfg above 1 and set cfg of PipeMesh Pool to 2, or sample"
    " on one GPU, without PipeMesh Parallelize."
)

# Of models that groups of one rank each compute, with branches and images shared out among them
TRIED_WHOLE = ("comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",)
WHOLE = TokenPlan(
    streams=(),
    blocks=(),
    leave=Leave(path="", stream=""),
    patch_size=1,
)
UNTRIED = replace(WHOLE, is_tried=False)


def class_path(model_class: type) -> str:
    return f"{model_class.__module__}:{model_class.__qualname__}"


def takes_rows_for_frames(model: nn.Module) -> bool:
    """Returns whether a model computes the rows of a batch as the frames of one video."""
    return any(class_path(type(module)) in OF_FRAMES for module in model.modules())


def whole_plan(model_class: type) -> TokenPlan | None:
    """The plan without blocks of a class of ComfyUI's own; None if such a model stays on one
    GPU.
    """
    name = class_path(model_class)
    if name in TRIED_WHOLE:
        return WHOLE
    # Ranks import ComfyUI alone: a class that a pack made is not the one that they build
    is_comfyuis = model_class.__module__.startswith("comfy.ldm.") and (
        getattr(sys.modules.get(model_class.__module__), model_class.__qualname__, None) is model_class
    )
    return UNTRIED if is_comfyuis and name not in ON_ONE_GPU else None


def why_no_plan(kind: str) -> str:
    """Returns why a transformer of a class, ``module:Class``, has no token plan, for users."""
    return {**WITHOUT_PLAN, **ON_ONE_GPU}.get(kind, NOT_YET)
