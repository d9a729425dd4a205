"""Transformers of ComfyUI's that have no token plan, and why: they run on one GPU.

A class that stands neither here nor in a plan is one that nobody has looked at
(``lab/tests/test_families_table.py`` finds it).
"""

from __future__ import annotations

from collections.abc import Mapping

from .plan import Leave, TokenPlan

NOT_YET = "no plan has been written yet"
UNET = "a UNet: its convolutions look at neighbouring pixels, and its skips cross all blocks"
NO_SAMPLER = "it makes no image or video"

WITHOUT_PLAN: Mapping[str, str] = {
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel": UNET,
    "comfy.ldm.cascade.stage_b:StageB": UNET,
    "comfy.ldm.cascade.stage_c:StageC": UNET,
    "comfy.ldm.seedvr.model:NaDiT": (
        "its attention looks at windows of the video, which lie elsewhere in each block"
    ),
    "comfy.ldm.wan.ar_model:CausalWanModel": "its sampler fills a cache of keys and values frame by frame",
    "comfy.ldm.ace.model:ACEStepTransformer2DModel": "linear attention, and convolutions between tokens",
    "comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel": (
        "every other block draws a window of neighbours over the tokens it has"
    ),
    "comfy.ldm.hydit.models:HunYuanDiT": "skips between its first and its last blocks",
    "comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain": "skips between its first and its last blocks",
    "comfy.ldm.depth_anything_3.model:DepthAnything3Net": NO_SAMPLER,
    "comfy.ldm.rt_detr.rtdetr_v4:RTv4": NO_SAMPLER,
    "comfy.ldm.sam3.detector:SAM3Model": NO_SAMPLER,
}


# Of models that groups of one rank each compute, with branches and images shared out among them
WHOLE = TokenPlan(
    family="unet",
    models=("comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",),
    streams=(),
    blocks=(),
    leave=Leave(path="", stream=""),
    patch_size=1,
)


def why_no_plan(model_class: type) -> str:
    """Returns why a transformer runs on one GPU, in words for users."""
    return WITHOUT_PLAN.get(f"{model_class.__module__}:{model_class.__qualname__}", NOT_YET)
