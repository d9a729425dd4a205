"""A step of all patches is told once, and a run cut short leaves nothing behind."""

from contextlib import contextmanager
from types import SimpleNamespace

import comfy.model_management as mm
import comfy.sample
import comfy.utils
import pytest
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_execution.utils import CurrentNodeContext, get_executing_context
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.lab.in_process import InOneProcess
from pipemesh.parallel_runtime.client import timelines
from pipemesh.parallel_runtime.client.separability import must_run_conds_in_sequence
from pipemesh.parallel_runtime.errors import PoolFailed

from ..kit.models import run
from ..kit.patched import (  # noqa: F401
    FREE,
    SIZE,
    Patched,
    advanced,
    built,
    cloned,
    models_let_go,
    one_cond_at_a_time,
    patched,
    stock,
    suspended_coroutines,
    together,
)


def steps_seen(model, **options):
    seen, options = [], {"size": SIZE, "steps": 4} | options
    out = run(
        model,
        callback=lambda *given: seen.append((given[0], given[3], *map(torch.clone, given[1:3]))),
        **options,
    )
    return seen, out


@pytest.mark.usefixtures("one_cond_at_a_time")
@pytest.mark.parametrize("sampler", ["dpm_fast", "sa_solver_pece"])
def test_every_step_is_told_once_in_order_with_stocks_own_x0(sampler):
    truth, ours = (steps_seen(one, cfg=2.0, sampler=sampler)[0] for one in (stock(), patched().model))
    assert patched().mode == FREE
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in truth]
    for told, own in zip(ours, truth, strict=True):
        assert torch.equal(told[2], own[2]) and torch.equal(told[3], own[3])


def test_a_stale_step_is_told_with_each_patchs_own_pixels():
    model = patched(warm_up=1).model
    free, out = steps_seen(model)
    in_step, _ = steps_seen(together(model))
    assert [entry[:2] for entry in free] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for told, own in zip(free, in_step, strict=True):
        assert relative_error(told[2], own[2]) <= BOUND and relative_error(told[3], own[3]) <= BOUND
    assert relative_error(model.model.process_latent_out(free[-1][2]), out) <= BOUND, "the last x0"
    patched(warm_up=1).modes.clear()


def test_the_hosts_preview_keeps_the_last_x0_and_knows_which_node_runs(monkeypatch):
    truth, contexts = advanced(stock())[1]["samples"], []
    told = lambda *_args, **_kwargs: contexts.append(get_executing_context())  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", told)
    with CurrentNodeContext("prompt", "17"):
        ours = advanced(patched().model)[1]["samples"]
    assert torch.equal(ours, truth) and patched().mode == FREE
    assert contexts and all(context.node_id == "17" for context in contexts)


class InOrder(InOneProcess):
    """Tells what was in flight when it was abandoned."""

    def __init__(self, *args):
        super().__init__(*args)
        self.flying = []
        self.most = 0
        self.abandoned = []

    def submit(self, call, patch):
        self.flying.append(super().submit(call, patch))
        self.most = max(self.most, len(self.flying))
        return self.flying[-1]

    def collect(self, ticket):
        assert self.flying.pop(0) is ticket, "not first in, first out"
        return ticket

    def abandon(self):
        self.abandoned.append(len(self.flying))
        self.flying.clear()


@pytest.fixture
def queue(monkeypatch):
    made = []

    def engine(*args):
        made.append(InOrder(*args))
        return made[-1]

    monkeypatch.setattr("pipemesh.lab.in_process.InOneProcess", engine)
    ours = Patched(built(), 3, 1)
    return ours, made[0]


def test_what_one_timeline_does_to_an_output_no_other_one_sees():
    result = timelines.Result(SimpleNamespace(collect=lambda ticket: torch.ones(2)), None)
    result.take().zero_()
    assert result.take().tolist() == [1, 1]


@contextmanager
def ends_with(error, engine, says=""):
    """Nothing is left suspended or in flight."""
    with pytest.raises(error, match=says):
        yield
    assert not suspended_coroutines() and not engine.flying


FOUR = {"size": SIZE, "steps": 4}
WRAPS = pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])


@pytest.mark.cover(2)
@pytest.mark.parametrize("error", [mm.InterruptProcessingException, ZeroDivisionError])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_exception_in_a_callback_unwinds_every_timeline_and_the_next_run_is_right(queue, error, at):
    ours, engine = queue
    truth = run(ours.model, **FOUR)
    assert not engine.flying and not engine.abandoned

    def callback(step, *_):
        if step == at:
            raise error

    with ends_with(error, engine):
        run(ours.model, **FOUR, callback=callback)
    assert engine.abandoned == ([2] if at < 3 else [])
    assert torch.equal(run(ours.model, **FOUR), truth)
    assert set(ours.modes) == {FREE}


def test_a_model_that_is_gone_amid_patches_ends_the_run_with_a_sentence(queue, monkeypatch):
    """What stages keep of the patches before is gone with it."""
    ours, engine = queue
    truth, asked = run(ours.model, **FOUR), iter([False] * 5 + [True])
    monkeypatch.setattr(engine, "restart_if_reloaded", lambda: next(asked, False), raising=False)
    says = r"^The model was unloaded, or its workers lost, while its patches"
    with ends_with(PoolFailed, engine, says):
        run(ours.model, **FOUR)
    assert torch.equal(run(ours.model, **FOUR), truth)


def failing(at, asked, own):
    """As ``own``, which fails when it is asked for the time with this number."""

    def function(*args, **kwargs):
        asked.append(args)
        if len(asked) == at:
            raise ZeroDivisionError
        return own(*args, **kwargs)

    return function


@pytest.mark.cover(2)
@pytest.mark.parametrize("cfg", [1.0, 3.0])
@WRAPS
def test_an_engine_that_fails_abandons_what_is_in_flight_and_the_next_run_is_right(
    queue, wrap, cfg, monkeypatch
):
    ours, engine = queue
    model = wrap(ours.model)
    truth = run(model, **FOUR, cfg=cfg)
    monkeypatch.setattr(engine, "submit", failing(6, [], engine.submit))
    with ends_with(ZeroDivisionError, engine):
        run(model, **FOUR, cfg=cfg)
    assert len(engine.abandoned) == 1
    assert torch.equal(run(model, **FOUR, cfg=cfg), truth)


TWO_PROMPTS = {**FOUR, "cfg": 3.0, "negative": conditioning(2, 13)}


@pytest.mark.parametrize("negative", [7, 13], ids=["unequal", "equal"])
@WRAPS
def test_positive_and_negative_are_in_flight_together(queue, wrap, negative):
    ours, engine = queue
    options = {**TWO_PROMPTS, "negative": conditioning(2, negative)}
    run(wrap(ours.model), **options)
    assert engine.most == 2 * 3 and not engine.flying
    assert relative_error(run(wrap(patched().model), **options), run(stock(), **options)) <= BOUND
    patched().modes.clear()


def never_entered_twice(kind):
    inside = []

    def wrapper(executor, *args, **kwargs):
        assert not inside
        inside.append(executor)
        try:
            return executor(*args, **kwargs)
        finally:
            inside.clear()

    return "add_wrapper", kind, wrapper


KEEPING = {  # what a node does to a MODEL
    "conds": lambda _: never_entered_twice(WrappersMP.CALC_COND_BATCH),
    "apply": lambda _: never_entered_twice(WrappersMP.APPLY_MODEL),
    "transformer": lambda _: never_entered_twice(WrappersMP.DIFFUSION_MODEL),
    "function": lambda _: (
        "set_model_unet_function_wrapper",
        lambda apply, given: apply(given["input"], given["timestep"], **given["c"]),
    ),
    "callback": lambda _: ("add_callback", CallbacksMP.ON_PREPARE_STATE, lambda *_: None),
    "object": lambda model: ("add_object_patch", "apply_model", model.model.apply_model),
}


@pytest.mark.parametrize("change", KEEPING)
def test_what_may_keep_something_from_cond_to_cond_sees_them_as_stock_does(queue, change):
    ours, engine = queue
    run(cloned(ours.model, *KEEPING[change](ours.model)), **TWO_PROMPTS)
    assert engine.most == 3, "positive and negative in one batch"


@pytest.mark.usefixtures("one_cond_at_a_time")
def test_a_region_and_the_negative_that_the_host_makes_for_it_are_kept_apart(queue, monkeypatch):
    """Which have one id."""
    (ours, engine), asked = queue, []
    monkeypatch.setattr(engine, "submit", failing(None, asked, engine.submit))
    region = [[text, {**extras, "area": (6, 5, 2, 3)}] for text, extras in conditioning(3, 9)]
    run(ours.model, **TWO_PROMPTS, positive=conditioning(1, 13) + region)
    branches = {call.branch for call, _patch in asked}
    assert len(branches) == 4 and len({branch.conds[0].split()[0] for branch in branches}) == 3


@pytest.mark.parametrize("name", ["hooks", "default"])
def test_conds_with_weights_of_their_own_or_that_fill_gaps_go_one_by_one(name):
    patcher = type("Patcher", (), {"object_patches": {}})
    alone = [[{name: object()}], [{}]], [None, [{}, {name: object()}]]
    for conds in (*alone, [[{}], [{name: None}]]):
        assert must_run_conds_in_sequence(patcher, conds, {}) == (conds in alone)


@pytest.mark.cover(2)
@WRAPS
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_cond_that_fails_leaves_none_of_the_others_waiting(queue, wrap, at, monkeypatch):
    ours, engine = queue
    truth, asked = run(wrap(ours.model), **TWO_PROMPTS), []
    once_a_cond = failing(at, asked, ours.model.model.process_timestep)
    with monkeypatch.context() as patch, ends_with(ZeroDivisionError, engine):
        patch.setattr(ours.model.model, "process_timestep", once_a_cond)
        run(wrap(ours.model), **TWO_PROMPTS)
    assert len(asked) == at
    assert torch.equal(run(wrap(ours.model), **TWO_PROMPTS), truth)


def test_gradients_stay_off_for_every_timeline_and_are_as_before_afterwards(monkeypatch):
    enabled, evaluate, image = [], InOneProcess.submit, torch.zeros(1, 16, *SIZE)
    monkeypatch.setattr(
        InOneProcess, "submit", lambda *args: enabled.append(torch.is_grad_enabled()) or evaluate(*args)
    )
    given = 3, 1.0, "euler", "simple", conditioning(1, 13), conditioning(2, 7), image
    comfy.sample.sample(Patched(built(), 3, 1).model, image, *given, disable_pbar=True)
    still_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert still_on and not any(enabled)
