"""A step of all patches is told once, and a run cut short leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
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
    seen = []
    out = run(
        model,
        size=SIZE,
        callback=lambda step, x0, x, total: seen.append((step, total, x0.clone(), x.clone())),
        **options,
    )
    return seen, out


@pytest.mark.usefixtures("one_cond_at_a_time")
@pytest.mark.parametrize("sampler", ["dpm_fast", "sa_solver_pece"])
def test_every_step_is_told_once_in_order_with_stocks_own_x0(sampler):
    options = {"steps": 4, "cfg": 2.0, "sampler": sampler}
    truth, _ = steps_seen(stock(), **options)
    ours, _ = steps_seen(patched().model, **options)
    assert patched().mode == FREE
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in truth]
    for told, own in zip(ours, truth, strict=True):
        assert torch.equal(told[2], own[2]) and torch.equal(told[3], own[3])


def test_a_stale_step_is_told_with_each_patchs_own_pixels():
    model = patched(warm_up=1).model
    free, out = steps_seen(model, steps=4)
    in_step, _ = steps_seen(together(model), steps=4)
    assert [entry[:2] for entry in free] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for told, own in zip(free, in_step, strict=True):
        assert relative_error(told[2], own[2]) <= BOUND and relative_error(told[3], own[3]) <= BOUND
    assert relative_error(model.model.process_latent_out(free[-1][2]), out) <= BOUND, (
        "the last x0 is the result"
    )
    patched(warm_up=1).modes.clear()


def test_the_hosts_preview_keeps_the_last_x0_and_knows_which_node_runs():
    import comfy.utils
    from comfy_execution.utils import CurrentNodeContext, get_executing_context

    truth = advanced(stock())[1]["samples"]
    contexts = []
    comfy.utils.set_progress_bar_global_hook(
        lambda *_args, **_kwargs: contexts.append(get_executing_context())
    )
    try:
        with CurrentNodeContext("prompt", "17"):
            ours = advanced(patched().model)[1]["samples"]
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    assert torch.equal(ours, truth)
    assert patched().mode == FREE
    assert contexts and all(context.node_id == "17" for context in contexts)


class Queue(InOneProcess):
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
        made.append(Queue(*args))
        return made[-1]

    monkeypatch.setattr("pipemesh.lab.in_process.InOneProcess", engine)
    ours = Patched(built(), 3, 1)
    return ours, made[0]


def interrupt():
    import comfy.model_management

    raise comfy.model_management.InterruptProcessingException


def fail():
    raise ZeroDivisionError


def test_what_one_timeline_does_to_an_output_no_other_one_sees():
    result = timelines.Result(SimpleNamespace(collect=lambda ticket: torch.ones(2)), None)
    result.take().zero_()
    assert result.take().tolist() == [1, 1]


@pytest.mark.cover(2)
@pytest.mark.parametrize("stop", [interrupt, fail])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_exception_in_a_callback_unwinds_every_timeline_and_the_next_run_is_right(queue, stop, at):
    import comfy.model_management

    ours, engine = queue
    truth = run(ours.model, size=SIZE, steps=4)
    assert not engine.flying and not engine.abandoned

    def callback(step, *_):
        if step == at:
            stop()

    with pytest.raises((comfy.model_management.InterruptProcessingException, ZeroDivisionError)):
        run(ours.model, size=SIZE, steps=4, callback=callback)
    assert not suspended_coroutines() and not engine.flying
    assert engine.abandoned == ([2] if at < 3 else [])
    assert torch.equal(run(ours.model, size=SIZE, steps=4), truth)
    assert set(ours.modes) == {FREE}


def test_a_model_that_is_gone_amid_patches_ends_the_run_with_a_sentence(queue, monkeypatch):
    """What stages keep of the patches before is gone with it."""
    ours, engine = queue
    truth = run(ours.model, size=SIZE, steps=4)
    asked = iter([False] * 5 + [True])
    monkeypatch.setattr(engine, "restart_if_reloaded", lambda: next(asked), raising=False)
    with pytest.raises(PoolFailed, match=r"^The model was unloaded, or its workers lost, while its patches"):
        run(ours.model, size=SIZE, steps=4)
    assert not suspended_coroutines() and not engine.flying
    monkeypatch.setattr(engine, "restart_if_reloaded", lambda: False, raising=False)
    assert torch.equal(run(ours.model, size=SIZE, steps=4), truth)


@pytest.mark.cover(2)
@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])
def test_an_engine_that_fails_abandons_what_is_in_flight_and_the_next_run_is_right(
    queue, wrap, cfg, monkeypatch
):
    ours, engine = queue
    model = wrap(ours.model)
    truth = run(model, size=SIZE, steps=4, cfg=cfg)
    submit, count = engine.submit, iter(range(99))

    def failing(*args):
        return fail() if next(count) == 5 else submit(*args)

    monkeypatch.setattr(engine, "submit", failing)
    with pytest.raises(ZeroDivisionError):
        run(model, size=SIZE, steps=4, cfg=cfg)
    monkeypatch.undo()
    assert not suspended_coroutines() and not engine.flying and len(engine.abandoned) == 1
    assert torch.equal(run(model, size=SIZE, steps=4, cfg=cfg), truth)


TWO_PROMPTS = {"size": SIZE, "steps": 4, "cfg": 3.0, "negative": conditioning(2, 13)}


@pytest.mark.parametrize("negative", [7, 13], ids=["unequal", "equal"])
@pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])
def test_positive_and_negative_are_in_flight_together(queue, wrap, negative):
    ours, engine = queue
    options = {**TWO_PROMPTS, "negative": conditioning(2, negative)}
    run(wrap(ours.model), **options)
    assert engine.most == 2 * 3 and not engine.flying
    assert relative_error(run(wrap(patched().model), **options), run(stock(), **options)) <= BOUND
    patched().modes.clear()


def never_entered_twice():
    inside = []

    def wrapper(executor, *args, **kwargs):
        assert not inside
        inside.append(executor)
        try:
            return executor(*args, **kwargs)
        finally:
            inside.clear()

    return wrapper


def function(apply, given):
    return apply(given["input"], given["timestep"], **given["c"])


@pytest.mark.usefixtures("one_cond_at_a_time")
def test_a_region_and_the_negative_that_the_host_makes_for_it_are_kept_apart(queue, monkeypatch):
    """Which have one id."""
    ours, engine = queue
    whole = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda call, patch: whole.append(call.branch) or submit(call, patch)
    )
    region = [[text, {**extras, "area": (6, 5, 2, 3)}] for text, extras in conditioning(3, 9)]
    run(ours.model, **TWO_PROMPTS, positive=conditioning(1, 13) + region)
    ids = {conds[0].split()[0] for conds in (branch.conds for branch in whole)}
    assert len(set(whole)) == 4 and len(ids) == 3


@pytest.mark.parametrize("name", ["hooks", "default"])
def test_conds_with_weights_of_their_own_or_that_fill_gaps_go_one_by_one(name):
    patcher = type("Patcher", (), {"object_patches": {}})
    assert must_run_conds_in_sequence(patcher, [[{name: object()}], [{}]], {}) and must_run_conds_in_sequence(
        patcher, [None, [{}, {name: object()}]], {}
    )
    assert not must_run_conds_in_sequence(patcher, [[{}], [{name: None}]], {})


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ("add_wrapper", lambda _: (WrappersMP.CALC_COND_BATCH, never_entered_twice())),
        ("add_wrapper", lambda _: (WrappersMP.APPLY_MODEL, never_entered_twice())),
        ("add_wrapper", lambda _: (WrappersMP.DIFFUSION_MODEL, never_entered_twice())),
        ("set_model_unet_function_wrapper", lambda _: (function,)),
        ("add_callback", lambda _: (CallbacksMP.ON_PREPARE_STATE, lambda *_: None)),
        ("add_object_patch", lambda model: ("apply_model", model.model.apply_model)),
    ],
    ids=["conds", "apply", "transformer", "function", "callback", "object"],
)
def test_what_may_keep_something_from_cond_to_cond_sees_them_as_stock_does(queue, change, given):
    ours, engine = queue
    run(cloned(ours.model, change, *given(ours.model)), **TWO_PROMPTS)
    assert engine.most == 3, "positive and negative in one batch"


@pytest.mark.cover(2)
@pytest.mark.parametrize("wrap", [lambda model: model, together], ids=["free", "single"])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_cond_that_fails_leaves_none_of_the_others_waiting(queue, wrap, at, monkeypatch):
    ours, engine = queue
    truth = run(wrap(ours.model), **TWO_PROMPTS)
    asked = []
    real = ours.model.model.process_timestep  # asked once for every cond

    def failing(timestep, **kwargs):
        asked.append(timestep)
        return fail() if len(asked) == at else real(timestep, **kwargs)

    monkeypatch.setattr(ours.model.model, "process_timestep", failing)
    with pytest.raises(ZeroDivisionError):
        run(wrap(ours.model), **TWO_PROMPTS)
    monkeypatch.setattr(ours.model.model, "process_timestep", real)
    assert len(asked) == at and not engine.flying and not suspended_coroutines()
    assert torch.equal(run(wrap(ours.model), **TWO_PROMPTS), truth)


def test_gradients_stay_off_for_every_timeline_and_are_as_before_afterwards(monkeypatch):
    import comfy.sample

    enabled = []
    evaluate = InOneProcess.submit
    monkeypatch.setattr(
        InOneProcess, "submit", lambda *args: enabled.append(torch.is_grad_enabled()) or evaluate(*args)
    )
    model = Patched(built(), 3, 1).model
    prompts, image = (conditioning(1, 13), conditioning(2, 7)), torch.zeros(1, 16, *SIZE)
    comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(image, 1),
        3,
        1.0,
        "euler",
        "simple",
        *prompts,
        image,
        disable_pbar=True,
    )
    still_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert still_on and not any(enabled)
