"""The registry of model families: one file per family, and its name in two lines here.

Nothing outside this folder names a family: what is tried on all of them iterates ``SAMPLES``, and
what is tried once for every word of the vocabulary ``REPRESENTATIVES``.
"""

from collections.abc import Mapping

from .aura import AURA
from .chroma import CHROMA
from .cogvideo import COGVIDEO
from .cosmos import COSMOS
from .ernie import ERNIE
from .flux import FLUX
from .hidream import HIDREAM
from .hidream_o1 import HIDREAM_O1
from .hunyuan_video import HUNYUAN_VIDEO
from .ideogram4 import IDEOGRAM4
from .joyimage import JOYIMAGE
from .kandinsky import KANDINSKY
from .krea2 import KREA2
from .lens import LENS
from .ltx import LTX
from .mage_flow import MAGE_FLOW
from .minimax import MINIMAX
from .nextdit import NEXTDIT
from .omnigen2 import OMNIGEN2
from .pixart import PIXART
from .pixeldit import PIXELDIT
from .plan import TokenPlan
from .qwen_image import QWEN_IMAGE
from .sample import Family, Released, Sample, Size
from .sd3 import SD3
from .wan import WAN
from .wan_animate import WAN_ANIMATE
from .wan_camera import WAN_CAMERA
from .wan_dancer import WAN_DANCER
from .wan_humo import WAN_HUMO
from .wan_s2v import WAN_S2V
from .wan_scail import WAN_SCAIL
from .wan_vace import WAN_VACE
from .without_plan import NOT_YET as NOT_YET
from .without_plan import WHOLE as WHOLE
from .without_plan import WITHOUT_PLAN as WITHOUT_PLAN
from .without_plan import why_no_plan as why_no_plan

FAMILIES: tuple[Family, ...] = (
    FLUX,
    SD3,
    WAN,
    WAN_CAMERA,
    WAN_SCAIL,
    WAN_VACE,
    WAN_S2V,
    WAN_HUMO,
    WAN_DANCER,
    WAN_ANIMATE,
    KANDINSKY,
    QWEN_IMAGE,
    HUNYUAN_VIDEO,
    CHROMA,
    HIDREAM,
    HIDREAM_O1,
    JOYIMAGE,
    NEXTDIT,
    OMNIGEN2,
    KREA2,
    MAGE_FLOW,
    IDEOGRAM4,
    ERNIE,
    LENS,
    LTX,
    MINIMAX,
    COSMOS,
    COGVIDEO,
    PIXELDIT,
    PIXART,
    AURA,
)
PLANS: tuple[TokenPlan, ...] = tuple(plan for family in FAMILIES for plan in family.plans)
SAMPLES: Mapping[str, Sample] = {sample.name: sample for family in FAMILIES for sample in family.samples}
REPRESENTATIVES: Mapping[str, Sample] = {
    name: sample for name, sample in SAMPLES.items() if sample.stands_for
}
RELEASED: Mapping[str, tuple[Sample, Released]] = {
    one.name: (sample, one) for sample in SAMPLES.values() for one in sample.form.released
}
PLAIN = next(iter(SAMPLES))  # for what any family will do


def plan_for(model_class: type) -> TokenPlan | None:
    """The plan of a ComfyUI model class. A subclass has its own forward and so needs its own
    plan.
    """
    name = f"{model_class.__module__}:{model_class.__qualname__}"
    return next((plan for plan in PLANS if name in plan.models), None)


def plan_or_whole(model_class: type) -> TokenPlan | None:
    """The plan of a ComfyUI model class; one without blocks for a class whose forward groups of one
    rank each compute whole.
    """
    name = f"{model_class.__module__}:{model_class.__qualname__}"
    return plan_for(model_class) or (WHOLE if name in WHOLE.models else None)


def sample_with(size: str) -> tuple[Sample, Size]:
    """The first sample that has a larger size of that name, and the size."""
    return next((sample, sample.larger[size]) for sample in SAMPLES.values() if size in sample.larger)
