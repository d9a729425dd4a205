"""The registry of token plans: one file per family, one line here."""

from .flux import FLUX
from .plan import TokenPlan

PLANS: tuple[TokenPlan, ...] = (FLUX,)


def plan_for(model_class: type) -> TokenPlan | None:
    """The plan of a host model class or of the nearest base class that has one."""
    for cls in model_class.__mro__:
        name = f"{cls.__module__}:{cls.__qualname__}"
        for plan in PLANS:
            if name in plan.models:
                return plan
    return None
