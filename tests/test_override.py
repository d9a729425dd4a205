"""Models whose attention passes no options: the override reaches one module, and nothing else."""

from dataclasses import replace

import pytest
from pipemesh.launcher.commands.parity import Case, stock_model
from pipemesh.parallel_runtime.families import FAMILIES, plan_for
from pipemesh.parallel_runtime.methods.override import Overridden

from .test_patches import Model, is_wrong, odd

SAMPLE = next(one for family in FAMILIES for one in family.samples if family.plans[0].blocks[0].without_options)


@pytest.fixture(scope="module")
def attentions():
    """The submodules of the first two blocks of such a model."""
    model = stock_model(SAMPLE.heads[0], family=SAMPLE.name).model.diffusion_model
    (group,) = plan_for(type(model)).blocks
    return [block.get_submodule(group.without_options) for block in model.get_submodule(group.path)[:2]]


def test_one_module_sees_the_override_until_it_is_removed(attentions):
    first, second = attentions
    own, names = type(first).forward, dict(type(first).forward.__globals__)
    overridden = Overridden(first, lambda attention, *args, **kwargs: attention(*args, **kwargs))
    assert first.forward.__func__.__code__ is own.__code__ and first.forward.__func__ is not own
    assert type(first).forward is own and "forward" not in vars(second)
    assert own.__globals__ == names, "its file is changed: models of ComfyUI's own process share it"
    overridden.remove()
    assert "forward" not in vars(first)


def test_without_the_word_a_patch_does_not_see_the_others():
    case = replace(odd(SAMPLE), mask=False)
    assert isinstance(case, Case)
    plan = plan_for(type(stock_model(case.heads, family=case.family).model.diffusion_model))
    (group,) = plan.blocks
    assert not is_wrong(Model(case, plan))
    assert is_wrong(Model(case, replace(plan, blocks=(replace(group, without_options=""),))))
