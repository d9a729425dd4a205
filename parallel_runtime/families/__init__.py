"""The registry of model families: one file per family, with plans and ``SAMPLES``, and a line here
for each class of ComfyUI's that it has a plan for. The file is imported when a MODEL of such a
class is looked at.

Nothing outside this folder names a family: tests of all families iterate ``SAMPLES`` of
``catalogue.py``, and tests of every word of the vocabulary its ``REPRESENTATIVES``.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .plan import BranchCache, TokenPlan
from .unplanned_models import class_path, whole_plan

FILES: Mapping[str, str] = {  # a class that has a plan -> the file of its family, :name if it is not PLAN
    "comfy.ldm.flux.model:Flux": "flux",
    "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper": "sd3",
    "comfy.ldm.wan.model:WanModel": "wan",
    "comfy.ldm.wan.model:CameraWanModel": "wan_camera",
    "comfy.ldm.wan.model:SCAILWanModel": "wan_scail",
    "comfy.ldm.wan.model:SCAIL2WanModel": "wan_scail",
    "comfy.ldm.wan.model:VaceWanModel": "wan_vace",
    "comfy.ldm.wan.model:WanModel_S2V": "wan_s2v",
    "comfy.ldm.wan.model:HumoWanModel": "wan_humo",
    "comfy.ldm.wan.model_wandancer:WanDancerModel": "wan_dancer",
    "comfy.ldm.wan.model_animate:AnimateWanModel": "wan_animate",
    "comfy.ldm.wan.model_animate2:WanAnimate2Model": "wan_animate2",
    "comfy.ldm.kandinsky5.model:Kandinsky5": "kandinsky",
    "comfy.ldm.kandinsky6.model:Kandinsky6NativeAVDiT": "kandinsky6",
    "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel": "qwen_image",
    "comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel": "qwen_image21",
    "comfy.ldm.hunyuan_video.model:HunyuanVideo": "hunyuan_video",
    "comfy.ldm.chroma.model:Chroma": "chroma",
    "comfy.ldm.chroma_radiance.model:ChromaRadiance": "chroma:RADIANCE",
    "comfy.ldm.hidream.model:HiDreamImageTransformer2DModel": "hidream",
    "comfy.ldm.hidream_o1.model:HiDreamO1Transformer": "hidream_o1",
    "comfy.ldm.joyimage.model:JoyImageTransformer3DModel": "joyimage",
    "comfy.ldm.lumina.model:NextDiT": "nextdit",
    "comfy.ldm.lumina.model:NextDiTPixelSpace": "nextdit:PIXELS",
    "comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel": "omnigen2",
    "comfy.ldm.boogu.model:BooguTransformer2DModel": "omnigen2:BOOGU",
    "comfy.ldm.krea2.model:SingleStreamDiT": "krea2",
    "comfy.ldm.mage_flow.model:MageFlowTransformer2DModel": "mage_flow",
    "comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel": "ideogram4",
    "comfy.ldm.ernie.model:ErnieImageModel": "ernie",
    "comfy.ldm.lens.model:LensTransformer2DModel": "lens",
    "comfy.ldm.lightricks.model:LTXVModel": "ltx",
    "comfy.ldm.lightricks.av_model:LTXAVModel": "ltx:AV_PLAN",
    "comfy.ldm.minimax.model:MiniMaxH3Model": "minimax",
    "comfy.ldm.cosmos.predict2:MiniTrainDIT": "cosmos",
    "comfy.ldm.anima.model:Anima": "cosmos",
    "comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel": "cogvideo",
    "comfy.ldm.pixeldit.model:PixDiT_T2I": "pixeldit",
    "comfy.ldm.pixeldit.pid:PidNet": "pixeldit:PID",
    "comfy.ldm.pixart.pixartms:PixArtMS": "pixart",
    "comfy.ldm.aura.mmdit:MMDiT": "aura",
}


def module_in(file: str) -> Any:
    """Returns the module of a family, by its file."""
    return import_module(f".{file}", __name__)


def file_of(kind: str) -> str:
    """Returns the file of the family that has a plan for a class, ``module:Class``."""
    return FILES[kind].partition(":")[0]


def plan_named(kind: str) -> TokenPlan | None:
    """Returns the plan of a class, ``module:Class``."""
    if kind not in FILES:
        return None
    file, _, name = FILES[kind].partition(":")
    return getattr(module_in(file), name or "PLAN")


def plan_for(model_class: type) -> TokenPlan | None:
    """Returns the plan of a class of ComfyUI's. A subclass has its own forward and so needs its own
    plan.
    """
    return plan_named(class_path(model_class))


def samples_for(kind: str) -> list[Any]:
    """Returns the samples of the family of a class, ``module:Class``, that this ComfyUI has."""
    return [sample for sample in module_in(file_of(kind)).SAMPLES if sample.is_here]


def kept_by(kind: str) -> BranchCache | None:
    """Returns the kept tokens of a class, ``module:Class``, whose models a node has keep tokens;
    None for other classes.
    """
    plan = plan_named(kind)
    return plan.kept if plan is not None else None


def plan_or_whole(model_class: type) -> TokenPlan | None:
    """Returns the plan of a class of ComfyUI's; one without blocks for a class whose forward groups
    of one rank each compute whole.
    """
    return plan_for(model_class) or whole_plan(model_class)
