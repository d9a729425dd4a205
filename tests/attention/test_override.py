"""Attention in blocks: the override reaches one module where no options are passed, and nothing
else; what attention is given by position is never dropped.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from pipemesh.lab.commands.parity import Case, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.override import Overridden
from pipemesh.parallel_runtime.methods.usp import SequenceParallel

from ..kit import joint_model
from ..kit.collectives import outputs_of
from ..kit.joint_model import HEADS
from ..methods.test_patches import Model, is_wrong, odd

SAMPLE = next(
    one for family in FAMILIES for one in family.samples if family.plans[0].blocks[0].without_options
)


@pytest.fixture(scope="module")
def attentions():
    """The submodules of the first two blocks of such a model."""
    model = stock_model(SAMPLE.heads[0], family=SAMPLE.name).model.diffusion_model
    (group,) = plan_for(type(model)).blocks
    return [block.get_submodule(group.without_options) for block in model.get_submodule(group.path)[:2]]


def test_one_module_sees_the_override_until_it_is_removed(attentions):
    first, second = attentions
    own, names = type(first).forward, dict(type(first).forward.__globals__)
    overridden = Overridden(first, partial)  # another object in the place of each function
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


def host_attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **_more
):
    return joint_model.attention_basic(q, k, v, heads, mask, skip_reshape, skip_output_reshape)


class ByPosition(joint_model.Block):
    """Gives attention by position what other blocks give by name."""

    more = (None, True)

    def forward(self, txt, img, mask, options):
        x = torch.cat((txt, img), 1)
        attend = options.get("optimized_attention_override", lambda attention, *args: attention(*args))
        qkv = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (x + attend(host_attention, *qkv, HEADS, mask, *self.more)).split(
            [txt.shape[1], img.shape[1]], 1
        )


@pytest.fixture
def by_position():
    model = joint_model.Model(2)
    for block in model.blocks:
        block.__class__ = ByPosition
    return model


def evaluated(make, model, monkeypatch):
    """The model's output: of two ranks, or of the plain loop over patches."""

    def compute(mesh):
        own = deepcopy(model)
        method = make(own, joint_model.PLAN, mesh)
        method.attach()
        patch = [None] if isinstance(method, PatchForward) else []
        return method.forward(own.forward, joint_model.CONDS[0], 1, *patch)

    return outputs_of(Layout(ulysses=2), compute, monkeypatch)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda model, plan, mesh: SequenceParallel(model, plan, mesh.sequence),
        lambda model, plan, mesh: PatchForward(model, plan),
    ],
    ids=["usp", "patches"],
)
def test_what_attention_gets_by_position_counts_and_what_nobody_knows_raises(by_position, make, monkeypatch):
    truth = by_position(**joint_model.CONDS[0])
    assert (evaluated(make, by_position, monkeypatch) - truth).abs().max() <= 1e-5
    monkeypatch.setattr(ByPosition, "more", (None, True, False, "new"))
    with pytest.raises(
        ModelError,
        match=(
            r"Attention is given 4 arguments by position behind its mask, and only 3 are known \(attn_precision"
        ),
    ):
        evaluated(make, by_position, monkeypatch)
