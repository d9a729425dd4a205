"""Models that look at the whole image before their blocks keep its patches together."""

from dataclasses import replace

from pipemesh.lab import in_process
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.parallel_runtime.families.plan import Together

from ..kit.patched import FREE, Patched

FAMILY = next(family for family in FAMILIES if family.plans[0].together.refiners)
SAMPLE = next(one for one in FAMILY.samples if one.prompt_extras is None)


def test_ahead_of_the_others_a_patch_would_find_in_a_refiner_what_is_not_made_yet(monkeypatch):
    case = Case(SAMPLE.name, "ulysses1", "odd", SAMPLE.heads[0], 1.0, False, "euler")

    def stale():
        return Patched(stock_model(case.heads, family=case.family), warm_up=1)

    in_step = sample(stale().model, case)
    unaware = replace(FAMILY.plans[0], together=Together())
    monkeypatch.setattr(in_process, "require_plan", lambda model: unaware)
    ahead = stale()
    assert relative_error(sample(ahead.model, case), in_step) > 100 * BOUND
    assert ahead.mode == FREE
