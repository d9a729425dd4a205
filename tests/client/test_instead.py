"""What nodes set on a MODEL object is seen, changed and gone on the one that is sampled in its
place, whichever way the layout was chosen: stock has one object.
"""

import copy
from dataclasses import replace
from itertools import pairwise
from types import MethodType

import comfy.samplers
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_custom_sampler import Guider_DualModel
from pipemesh.lab.commands.parity import conditioning, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import RemotePatcher
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.layout import Layout

from ..crossing.test_options import sampled_by
from ..kit.bounds import assert_same
from ..planner.test_planning import OPEN, PoolsHere, made_auto

__all__ = ["made_auto"]  # a fixture
BY_HAND = replace(OPEN, is_open=False)


class Cloned:
    """What a node attaches to a MODEL, and its clones have another of."""

    def __init__(self, of):
        self.of = of

    def on_model_patcher_clone(self):
        return Cloned(None)


def their_node(model):
    """A node of another pack: its sampler finds its settings on the guider's MODEL object, and
    leaves its results there. Returns the image, and what the node finds on its own MODEL then.
    """
    asked = []
    model.theirs_scale, model.theirs_step, model.theirs_once = 1.01, 0, True
    model.theirs_scaled = MethodType(lambda self, x: (x * self.theirs_scale, self), model)
    model.set_attachments("before", Cloned(asked))
    stocks = model.get_model_object
    model.get_model_object = MethodType(lambda self, name: asked.append(self) or stocks(name), model)

    def sampler(denoise, x, sigmas, extra_args=None, callback=None, disable=None):
        patcher = denoise.inner_model.model_patcher
        del patcher.theirs_once
        asked.clear()
        for now, then in pairwise(sigmas):
            patcher.theirs_step += 1
            model.theirs_scale *= 1.02  # later than what is sampled was made
            x = x + (x - denoise(x, now.expand(len(x)), **extra_args)) / now * (then - now)
            x, of = patcher.theirs_scaled(x)
            assert of is patcher
            patcher.get_model_object("model_sampling")
            assert asked[-1] is patcher
        patcher.theirs_result = x.shape
        patcher.set_attachments("theirs", patcher.get_attachment("before"))
        return x

    image = sampled_by(model, sampler)
    del model.get_model_object
    found = model.theirs_step, model.theirs_scale, model.theirs_result, hasattr(model, "theirs_once")
    assert model.get_attachment("theirs").of is asked, "not that of a clone"
    return image, (*found, len(asked))


@pytest.mark.parametrize("form", ["auto", "open", "by hand"])
def test_a_node_that_keeps_its_settings_on_the_model_object_finds_them_there(made_auto, form):
    runtime, model, stock = PoolsHere(stock_model(5)), stock_model(5), stock_model(5)
    made, left = made_auto(runtime), {}
    ours = model if form == "auto" else runtime.parallelize(model, OPEN if form == "open" else BY_HAND)

    def kept(one):
        made.switch.fixed = one is ours and form == "auto"
        image, left[one is ours] = their_node(one)
        return image

    assert_same(kept, ours, stock)
    assert left[True] == left[False]
    assert sum(len(here.asked) for here, _ in runtime.pools.values()) == 6


def test_both_models_of_a_guider_have_what_was_set_on_them(made_auto):
    models, seen = [stock_model(5), stock_model(5)], []
    made_auto(PoolsHere(stock_model(5))).switch.fixed = True
    guider = Guider_DualModel(*models)
    guider.set_conds(conditioning(1, 13), conditioning(2, 7))
    for number, model in enumerate(models):
        model.theirs = number

    def sampler(denoise, x, *_args, **_kwargs):
        for one in vars(denoise.inner_model).values():
            if isinstance(one, ModelPatcher):
                seen.append((one.theirs, isinstance(one, RemotePatcher)))
                one.theirs += 10
        return x

    noise, solver = torch.zeros(1, 16, 8, 10), comfy.samplers.KSAMPLER(sampler)
    with torch.inference_mode():
        guider.sample(noise, noise, solver, torch.linspace(1, 0, 2), disable_pbar=True)
    assert seen == [(0, True), (1, True)]
    assert [model.theirs for model in models] == [10, 11]


@pytest.fixture
def instead():
    """A stock MODEL, and one in its place that has another in its own."""
    runtime, model = PoolsHere(stock_model(5)), stock_model(5)
    model.__class__ = type("Dynamic", (type(model),), {"get_non_dynamic_delegate": None})
    in_groups = replace(OPEN, placement=replace(OPEN.placement, layout=Layout(cfg=2)))
    return model, runtime.parallelize(runtime.parallelize(model, OPEN), in_groups)


def test_what_is_set_on_any_of_the_objects_is_on_all_and_not_on_their_clones(instead):
    model, ours = instead
    ours.theirs = {"steps": 3}
    assert model.theirs is ours.theirs is copy.copy(ours).theirs
    assert not any(hasattr(one.clone(), "theirs") for one in instead)
    del model.theirs
    for use in (getattr, delattr):
        with pytest.raises(AttributeError, match="theirs"):
            use(ours, "theirs")
    model.theirs = 1
    del ours.theirs
    assert not hasattr(model, "theirs")
    assert not hasattr(ours, "get_non_dynamic_delegate"), "of a class that ours is not"
    ours.hook_mode = before = object()
    assert ours.hook_mode is before and model.hook_mode is not before, "a field of ComfyUI's"


def their_method(self, *_args):
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize("name", ["partially_load", "load", "clone", "patch_weight_to_device"])
def test_a_method_of_the_model_object_that_the_pool_does_not_call_is_refused_by_name(name):
    model = stock_model(5)
    setattr(model, name, MethodType(their_method, model))
    says = rf"their_method in the place of this MODEL's method {name}, which .*: remove that node"
    with pytest.raises(Refused, match=says):
        PoolsHere(stock_model(5)).parallelize(model, BY_HAND)
