"""All families, in the order of the registry, for code that goes through every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import FILES, file_of, module_in, plan_named
from .plan import TokenPlan
from .sample import Released, Sample, Size


@dataclass(frozen=True)
class Family:
    """All that a family's file says. ``name``: the file's. ``unreleased``: the classes without a
    released model, and why. ``ahead``: the code of ComfyUI's that it was tried on before a tested
    version had its classes.
    """

    name: str
    plans: tuple[TokenPlan, ...]
    samples: tuple[Sample, ...]
    unreleased: Mapping[str, str]
    ahead: str

    @classmethod
    def of(cls, file: str) -> Family:
        plans = {FILES[kind]: plan_named(kind) for kind in FILES if file_of(kind) == file}
        module = module_in(file)
        unreleased, ahead = getattr(module, "UNRELEASED", {}), getattr(module, "AHEAD", "")
        return cls(file, tuple(filter(None, plans.values())), module.SAMPLES, unreleased, ahead)

    def here(self) -> Family | None:
        """Returns the family with the samples of the ComfyUI at hand; None if that has none."""
        samples = tuple(sample for sample in self.samples if sample.is_here)
        return replace(self, samples=samples) if samples else None


REGISTERED: tuple[Family, ...] = tuple(map(Family.of, dict.fromkeys(map(file_of, FILES))))
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
