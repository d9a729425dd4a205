"""The registry of token plans: one file per family, one line here."""

from .flux import FLUX
from .plan import TokenPlan
from .sd3 import SD3
from .wan import WAN

PLANS: tuple[TokenPlan, ...] = (FLUX, SD3, WAN)


def plan_for(model_class: type) -> TokenPlan | None:
    """The plan of a host model class. A subclass has its own forward and so needs its own plan."""
    name = f"{model_class.__module__}:{model_class.__qualname__}"
    return next((plan for plan in PLANS if name in plan.models), None)
