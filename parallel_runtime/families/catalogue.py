"""All families, in the order of the registry, for code that goes through every one of them."""

from collections.abc import Mapping

from . import FILES, family_in, file_of, plan_named
from .plan import TokenPlan
from .sample import Family, Released, Sample, Size

REGISTERED: tuple[Family, ...] = tuple(family_in(file) for file in dict.fromkeys(map(file_of, FILES)))
PLANS: tuple[TokenPlan, ...] = tuple(plan for family in REGISTERED for plan in family.plans)
# Those of the ComfyUI at hand
FAMILIES: tuple[Family, ...] = tuple(filter(None, map(Family.here, REGISTERED)))
NOT_HERE: Mapping[str, str] = {
    sample.name: f"{sample.name} needs ComfyUI {sample.since}"
    for family in REGISTERED
    for sample in family.samples
    if not sample.is_here
}
SAMPLES: Mapping[str, Sample] = {sample.name: sample for family in FAMILIES for sample in family.samples}
REPRESENTATIVES: Mapping[str, Sample] = {
    name: sample for name, sample in SAMPLES.items() if sample.stands_for
}
RELEASED: Mapping[str, tuple[Sample, Released]] = {
    one.name: (sample, one) for sample in SAMPLES.values() for one in sample.form.released
}
PLAIN = next(iter(SAMPLES))  # for what any family will do


def classes_of(plan: TokenPlan) -> list[str]:
    """Returns the classes of ComfyUI's that have this plan, as ``module:Class``."""
    return [kind for kind in FILES if plan_named(kind) is plan]


def sample_with(size: str) -> tuple[Sample, Size]:
    """The first sample that has a larger size of that name, and the size."""
    return next((sample, sample.larger[size]) for sample in SAMPLES.values() if size in sample.larger)
