"""Conditioning is recognised by the tensors that it was made of, wherever all code between them and
the transformer is ComfyUI's, and looked at everywhere else.
"""

import gc
import weakref
from functools import cache, partial

import pytest
import torch
from comfy.conds import CONDCrossAttn, CONDRegular
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client.branch import origins_by_cond
from pipemesh.parallel_runtime.client.conditioning import ConditioningCache
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.wire.arena import Arena

from ..kit.models import load, run

LAYOUTS = {"ulysses": (2,), "cfg": (1, 1, 1, 2), "pipefusion": (1, 1, 2)}


def of_parts(**parts):
    return {"uuid": "1", "model_conds": parts}


def cond(text, **others):
    return {**of_parts(c_crossattn=CONDCrossAttn(text)), **others}


def origins(*conds):
    return tuple(origins_by_cond([list(conds)]).values())


def are_same(ones, others):
    return len(ones) == len(others) == 1 and ones[0].is_same(others[0])


def test_a_tensor_is_the_same_while_it_is_the_same_object_and_nobody_has_written_to_it():
    text = torch.ones(1, 4, 8)
    before = origins(cond(text))
    assert are_same(before, origins(cond(text)))
    assert not are_same(before, origins(cond(text.clone()))), "a node made it anew"
    with torch.inference_mode():
        text[0, 1] = 2
    assert not are_same(before, origins(cond(text))), "written to in place"


def test_what_is_made_where_a_freed_tensor_was_is_another_one():
    text = torch.ones(1, 4, 8)
    before, seen = origins(cond(text)), weakref.ref(text)
    del text
    gc.collect()
    assert seen() is None, "its origin keeps it alive"
    assert not are_same(before, origins(cond(torch.ones(1, 4, 8)))) and not are_same(before, before)


OTHERS_PARTS = {
    "area": lambda text: cond(text, area=(4, 4, 0, 4)),
    "number": lambda text: of_parts(c_crossattn=CONDCrossAttn(text), fps=CONDRegular(25)),
    "name": lambda text: of_parts(y=CONDCrossAttn(text)),
    "list": lambda text: of_parts(c_crossattn=CONDRegular([text, text])),
    "what nobody can compare": lambda text: of_parts(c_crossattn=CONDRegular({1: object()})),
}


@pytest.mark.parametrize("other", OTHERS_PARTS)
def test_a_cond_of_other_parts_is_another_one(other):
    text = torch.ones(1, 4, 8)
    assert not are_same(origins(cond(text)), origins(OTHERS_PARTS[other](text)))


def test_of_two_conds_that_bear_one_name_nobody_knows_which_an_evaluation_is_of():
    """They may take turns, each in a part of the steps."""
    one, other = cond(torch.ones(1, 4, 8)), cond(torch.zeros(1, 4, 8))
    assert origins(one) and not origins(one, other)
    assert len(origins_by_cond([[one], [other]])) == 2, "on two sides they are two"


def test_what_is_recognised_is_the_last_that_was_sent_under_its_branch_and_name(monkeypatch):
    arena = Arena()
    cache = ConditioningCache(arena)
    one, other = torch.ones(4, 8), torch.zeros(4, 8)
    sent = cache.put("branch", "context", one.clone(), origins(cond(one)))
    ours = cache.put("branch", "context", other.clone(), origins(cond(other)))
    monkeypatch.setattr(ConditioningCache, "_is_content", lambda *_: pytest.fail("looked at"))
    assert cache.put("branch", "context", other.clone(), origins(cond(other))) == ours != sent
    ref, is_right = cache.assume("branch", "context", other.clone(), origins(cond(other)))
    assert ref == ours and is_right()
    monkeypatch.undo()
    assert cache.put("another", "context", one.clone(), origins(cond(other))) == sent
    assert cache.put("branch", "y", one.clone(), origins(cond(other))) == sent
    cache.begin_run()
    assert cache.put("branch", "context", one.clone(), origins(cond(other))) == sent, "of the run before"
    arena.close()


@pytest.fixture
def looks(monkeypatch):
    """What was compared by its content, at which evaluation."""
    seen, own = [], ConditioningCache._is_content
    monkeypatch.setattr(ConditioningCache, "_is_content", lambda *args: seen.append(args) or own(*args))
    return seen


@pytest.fixture(scope="module")
def models(files, clients):
    """layout -> its parallel MODEL."""

    @cache
    def made(name):
        patching = [Patching(2, 1)] if name == "pipefusion" else []
        return parallelize(load(files["model"]), clients(*LAYOUTS[name]), 0.0, *patching)

    return lambda name: made(name).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_the_second_evaluation_on_no_conditioning_is_looked_at(models, looks, layout):
    for _ in range(2):
        run(models(layout), steps=4, cfg=2.0)
        assert len(looks) == 0


def in_area(text, *area):
    return [[tensor, {**extras, "area": area, "strength": 1.0}] for tensor, extras in text]


def scaled(text, at):
    return text * (1 + 0.25 * at)


def by_function(model, at):
    def function(apply, call):
        call["c"]["c_crossattn"] = scaled(call["c"]["c_crossattn"], next(at))
        return apply(call["input"], call["timestep"], **call["c"])

    model.set_model_unet_function_wrapper(function)


def by_wrapper(kind):
    def changed(one, own):
        text = own["model_conds"]["c_crossattn"].cond
        parts = {**own["model_conds"], "c_crossattn": CONDCrossAttn(scaled(text, one))}
        return {**own, "model_conds": parts}

    def of_conds(at, executor, model, conds, *args):
        change = partial(changed, next(at))
        return executor(model, [side and [*map(change, side)] for side in conds], *args)

    def of_model(at, executor, x, t, c_concat, context, *args, **kwargs):
        return executor(x, t, c_concat, scaled(context, next(at)), *args, **kwargs)

    wrapper = of_conds if kind == WrappersMP.CALC_COND_BATCH else of_model
    return lambda model, at: model.add_wrapper(kind, partial(wrapper, at))


def in_place(model, at):
    def function(args):
        for own in args["cond"]:
            own["model_conds"]["c_crossattn"].cond.mul_(1.25)
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(function)


@pytest.mark.cover(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "change",
    [by_function, by_wrapper(WrappersMP.CALC_COND_BATCH), by_wrapper(WrappersMP.APPLY_MODEL), in_place],
    ids=["function", "conds", "model", "in place"],
)
def test_conditioning_that_a_nodes_code_changes_from_step_to_step_is_what_stock_sees(
    files, models, layout, change
):
    def sampled(model):
        model = model.clone()
        change(model, iter(range(100)))
        with torch.inference_mode():  # as ComfyUI makes them: torch counts no changes of these
            positive = [[tensor.clone(), extras] for tensor, extras in conditioning(1, 13)]
        return run(model, steps=3, positive=positive)

    stock = load(files["model"])
    truth = sampled(stock)
    assert relative_error(run(stock, steps=3), truth) > 10 * BOUND, "the change does nothing"
    bound = 0.2 if layout == "pipefusion" else BOUND
    assert relative_error(sampled(models(layout)), truth) <= bound


def test_conds_of_two_regions_are_told_apart(files, models, looks):
    both = [*in_area(conditioning(1, 13), 4, 10, 0, 0), *in_area(conditioning(3, 13), 4, 10, 4, 0)]
    truth = run(load(files["model"]), cfg=2.0, positive=both)
    assert relative_error(run(models("ulysses"), cfg=2.0, positive=both), truth) <= BOUND
    assert not looks
