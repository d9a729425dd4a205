"""Auto mode in one process: every guider samples in the pool while the switch is on, without an
edit; what the pool cannot honour is stock's own result, with one notice that says why.
"""

from types import SimpleNamespace

import comfy.sample
import comfy.sampler_helpers
import comfy.samplers
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext
from pipemesh.lab.commands.parity import BOUND, relative_error
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.sampling import GIVEN_UP, GRADIENTS
from pipemesh.nodes.auto.seam import UNSEEN, GuiderSeam, HostChanged, StockCall
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.errors import PoolFailed, Refused, RunCancelled
from pipemesh.parallel_runtime.wire.tree import NotPlain

from ..fixtures import ALL
from ..kit.foreign_pack import halved_keys, unet, video_unet, without_plan
from ..kit.models import conditioning, load, run, with_lora
from ..kit.shared_runtime import SharedRuntime, settings

__all__ = ["settings"]  # a fixture
STOCK = {name: vars(comfy.samplers.CFGGuider)[name] for name in ("sample", *UNSEEN)}


@pytest.fixture
def notices():
    return Notices()


@pytest.fixture
def auto(client, settings, notices):
    runtime = SharedRuntime(client)
    made = Auto(lambda: runtime, Switch({}, lambda: settings.file), notices, runtime.planning.times)
    made.install()
    yield made
    made.remove()


def said(notices):
    return [notice.text for notice in notices.latest()]


# -- in the pool, and back


def test_switched_on_and_off_in_turn_the_images_are_equal_and_only_those_of_on_are_of_the_pool(
    auto, settings, requests, files, notices
):
    model = load(files["model"])
    truth = run(model, cfg=2.0)
    for number in range(50 if ALL else 4):
        settings(number % 2 == 0)
        requests.clear()
        image = run(model, cfg=2.0)
        if number % 2:
            assert not requests["Forward"]
        else:
            assert requests["Forward"]
        # Off too: weights that lie in the file's pages now round otherwise
        assert relative_error(image, truth) <= BOUND
    assert not said(notices)


def test_what_ranks_held_for_auto_mode_is_freed_once_it_is_off(auto, settings, client, files):
    model = load(files["model"])
    settings(True)
    run(model)
    assert client.sessions.live.models
    settings(False)
    run(model)
    assert not client.sessions.live.models


def test_a_model_that_is_being_compared_with_stock_is_on_one_gpu_and_in_the_pool_after_that(
    auto, settings, requests, notices, files
):
    trials, model = (
        {type(load(files["model"]).model.diffusion_model): "is being compared"},
        load(files["model"]),
    )

    def require(transformer, model):
        if transformer in trials:
            raise Refused(f"{transformer.__name__} {trials[transformer]}.")

    auto._runtime().trials = SimpleNamespace(require=require)
    settings(True)
    truth = run(model)
    assert not requests["Forward"] and said(notices) == ["On one GPU: Flux is being compared."]
    trials.clear()
    assert relative_error(run(model), truth) <= BOUND
    assert requests["Forward"]


def test_a_lora_and_its_strength_reach_the_pool(auto, settings, requests, files):
    model = load(files["model"])
    for strength in (1.0, 0.3):
        patched = with_lora(model, files, strength)
        settings(False)
        truth = run(patched)
        settings(True)
        requests.clear()
        assert relative_error(run(patched), truth) <= BOUND
        assert requests["SetWeightPatches"] == 1


def guided(guider, sampler="euler"):
    noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
    sigmas = comfy.samplers.calculate_sigmas(
        guider.model_patcher.get_model_object("model_sampling"), "simple", 3
    )
    with torch.inference_mode():
        return guider.sample(
            noise,
            torch.zeros_like(noise),
            comfy.samplers.sampler_object(sampler),
            sigmas,
            disable_pbar=True,
            seed=2,
        )


def guider_of(model, kind=comfy.samplers.CFGGuider):
    guider = kind(model)
    guider.set_conds(conditioning(1, 13), conditioning(2, 7))
    guider.set_cfg(3.0)
    return guider


class ForeignGuider(comfy.samplers.CFGGuider):
    """Another pack's, with an option of its own set beside the MODEL's."""

    def __init__(self, model):
        super().__init__(model)
        self.model_options = comfy.model_patcher.create_model_options_clone(model.model_options)
        self.model_options["sampler_post_cfg_function"] = [lambda args: args["denoised"] * 0.5]


@pytest.mark.parametrize("kind", [comfy.samplers.CFGGuider, ForeignGuider])
def test_a_guider_made_and_sampled_while_off_is_parallel_once_it_is_on_and_keeps_what_is_its_own(
    auto, settings, requests, files, kind
):
    guider = guider_of(load(files["model"]), kind)
    before = dict(vars(guider))
    truth = guided(guider)
    settings(True)
    assert relative_error(guided(guider), truth) <= BOUND
    assert requests["Forward"]
    assert {name: value for name, value in vars(guider).items() if name in before} == before
    settings(False)
    requests.clear()
    assert relative_error(guided(guider), truth) <= BOUND
    assert not requests["Forward"]


def test_both_models_of_a_guider_with_two_run_in_the_pool(auto, settings, requests, files):
    import comfy_extras.nodes_custom_sampler as custom

    guider = guider_of(
        load(files["model"]), lambda model: custom.Guider_DualModel(model, load(files["other"]))
    )
    truth = guided(guider)
    settings(True)
    requests.clear()
    assert relative_error(guided(guider), truth) <= BOUND
    assert requests["Forward"] == 6


def test_a_parallelized_model_keeps_its_own_pool(auto, settings, client, files):
    settings(True)
    run(remote_patcher.parallelize(load(files["model"]), client, holds_ui_device=True))
    assert not auto._runtime().choices


# -- on one GPU, with a notice


def with_patch(model):
    clone = model.clone()
    clone.set_model_attn1_patch(halved_keys)
    return clone


KINDS = {
    "unet": (
        lambda path: unet(),
        "UNetModel has no token plan (a UNet: its convolutions look at neighbouring pixels",
    ),
    "no plan": (
        lambda path: without_plan(load(path)),
        "Unplanned has no token plan (no plan has been written yet",
    ),
    "patch": (
        lambda path: with_patch(load(path)),
        "foreign_pack.halved_keys (patches/attn1_patch) runs inside the model's blocks",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_pool_cannot_honour_is_stocks_result_to_the_bit_with_one_notice_that_says_why(
    auto, settings, requests, notices, files, kind
):
    make, sentence = KINDS[kind]
    model = make(files["model"])
    latent = torch.zeros(1, model.model.latent_format.latent_channels, 8, 8)
    truth = run(model, cfg=2.0, latent=latent)
    settings(True)
    requests.clear()
    assert torch.equal(run(model, cfg=2.0, latent=latent), truth)
    (notice,) = said(notices)
    assert notice.startswith("On one GPU: ") and sentence in notice
    assert "PipeMesh Parallelize" not in notice and "remove the node" not in notice
    assert not auto._runtime().wait.lasts, "the wait that planning began is over"
    assert not requests["Forward"]


def test_frames_of_one_video_are_on_one_gpu_with_a_notice_and_no_prompt_tries_the_pool(
    auto, settings, requests, notices
):
    model, latent = video_unet(), torch.zeros(4, 4, 8, 8)
    truth = run(model, latent=latent)
    settings(True)
    requests.clear()
    for prompt in ("1", "2"):
        with CurrentNodeContext(prompt_id=prompt, node_id="3"):
            assert torch.equal(run(model, latent=latent), truth)
    assert not requests, "nothing is loaded"
    assert [
        one.removeprefix("On one GPU: The rows of this batch are the frames of one") for one in said(notices)
    ] == [" video, which the model computes together, and there is no other prompt for another GPU."] * 2


def failing(monkeypatch, error, times=1000):
    """Evaluations in the pool that raise; how often they were asked."""
    calls, evaluate = [], remote_patcher.RemotePatcher.sample_call

    def fails(*args):
        calls.append(args)
        if len(calls) <= times:
            raise error
        return evaluate(*args)

    monkeypatch.setattr(remote_patcher.RemotePatcher, "sample_call", fails)
    return calls


DIED = PoolFailed("Rank 1 on cpu was killed: run again.\nLast lines of rank 1:\n  its last words")


def test_a_pool_that_fails_twice_costs_a_notice_and_no_image_and_the_log_has_the_last_lines(
    auto, settings, notices, files, monkeypatch, caplog
):
    model = load(files["model"])
    truth = run(model)
    settings(True)
    calls = failing(monkeypatch, DIED)
    assert relative_error(run(model), truth) <= BOUND
    assert len(calls) == 2
    (notice,) = notices.latest()
    assert notice.text == "On one GPU: Rank 1 on cpu was killed: run again."
    assert notice.detail == "Last lines of rank 1:\n  its last words"
    assert "its last words" in caplog.messages[-1]


def test_a_pool_that_failed_is_not_tried_again_in_the_same_prompt(
    auto, settings, notices, files, monkeypatch
):
    model, tried = load(files["model"]), []
    settings(True)
    calls = failing(monkeypatch, DIED)
    for prompt, node in (("first", "3"), ("first", "4"), ("second", "3")):
        with CurrentNodeContext(prompt, node):
            run(model)
        tried.append(len(calls))
    assert tried == [2, 2, 4] and said(notices)[1] == GIVEN_UP


def test_a_worker_that_dies_once_costs_a_fresh_pool_and_no_notice(
    auto, settings, requests, notices, files, monkeypatch
):
    model = load(files["model"])
    truth = run(model)
    settings(True)
    requests.clear()
    failing(monkeypatch, DIED, times=1)
    assert relative_error(run(model), truth) <= BOUND
    assert requests["Forward"] and not said(notices)


@pytest.mark.parametrize(
    "error",
    [NotPlain("context", object()), AttributeError("no such thing"), OSError(28, "No space left")],
    ids=repr,
)
def test_an_error_that_nobody_thought_of_costs_a_notice_and_no_image_and_its_traceback_is_logged(
    auto, settings, notices, files, monkeypatch, caplog, error
):
    model = load(files["model"])
    truth = run(model)
    settings(True)
    calls = failing(monkeypatch, error)
    assert relative_error(run(model), truth) <= BOUND
    assert len(calls) == 1
    assert said(notices) == [f"On one GPU: {type(error).__name__}: {error}"]
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


def test_what_is_refused_leaves_other_models_in_the_ranks(auto, settings, client, requests, files):
    model = load(files["model"])
    settings(True)
    run(model)
    held = set(client.sessions.live.models)
    run(unet(), latent=torch.zeros(1, 4, 8, 8))
    assert held and held <= set(client.sessions.live.models)
    requests.clear()
    run(model)
    assert requests["Forward"] and not requests["Load"]


def test_a_refused_guider_inside_another_leaves_the_outer_ones_model_in_the_ranks(
    auto, settings, client, requests, files
):
    model = load(files["model"])

    def inside(args):
        """In the last step: ComfyUI itself ends what samples one model within another's steps."""
        steps.append(args)
        if len(steps) == 3:
            held.update(client.sessions.live.models)
            run(with_patch(model))
            assert held <= set(client.sessions.live.models)
        return args["denoised"]

    steps, held, outer = [], set(), model.clone()
    outer.set_model_sampler_post_cfg_function(inside)
    settings(True)
    run(outer)
    assert held and len(steps) == 3 and requests["Load"] <= 1


def test_stop_is_heard_while_what_ranks_held_is_freed(auto, settings, client, files, monkeypatch):
    import comfy.model_management as mm

    model = load(files["model"])
    settings(True)
    run(model)
    settings(False)
    monkeypatch.setattr(mm, "processing_interrupted", lambda: True)
    monkeypatch.setattr(type(client.sessions), "settle", cancelled_where_stopped)
    with pytest.raises(mm.InterruptProcessingException):
        auto.sample(guider_of(model), stock_run(model, lambda: pytest.fail("it went on")))


def stock_run(model, call=lambda: None):
    given = {"noise": None, "sigmas": torch.ones(2)}
    return StockCall(call, StepTimes().watch(guider_of(model), None, None, None), given)


def cancelled_where_stopped(_self, interrupted):
    if interrupted():
        raise RunCancelled("Stop")


def test_a_model_that_a_node_has_put_on_another_device_stays_there(
    auto, settings, requests, notices, files, monkeypatch
):
    import comfy.model_management as mm

    model = load(files["model"])
    settings(True)
    own = mm.get_torch_device()
    monkeypatch.setattr(mm, "get_torch_device", lambda: torch.device("meta"))
    with torch.inference_mode():
        auto.sample(guider_of(model), stock_run(model))
    assert said(notices) == [f"On one GPU: A node has put this MODEL on {own}, but ComfyUI computes on meta."]


def test_a_notice_told_again_in_one_prompt_is_one_with_a_count():
    shown = []
    notices = Notices(shown.append)
    for text in ("first", "second", "first", "first"):
        notices.tell(text)
    assert [(notice.text, notice.count) for notice in notices.latest()] == [("first", 3), ("second", 1)]
    assert [notice.text for notice in shown] == ["first", "second"]


def test_stop_ends_the_run_and_starts_no_other(auto, settings, notices, files, monkeypatch):
    import comfy.model_management as mm

    def stopped(*_):
        raise mm.InterruptProcessingException

    settings(True)
    monkeypatch.setattr(remote_patcher.RemotePatcher, "sample_call", stopped)
    with pytest.raises(mm.InterruptProcessingException):
        run(load(files["model"]))
    assert not said(notices)


class Trains(comfy.samplers.Sampler):
    """Asks for the gradient of a weight, as TrainSampler does."""

    def sample(
        self,
        model_wrap,
        sigmas,
        extra_args,
        callback,
        noise,
        latent_image=None,
        denoise_mask=None,
        disable_pbar=False,
    ):
        weight = list(model_wrap.inner_model.diffusion_model.parameters())[-1].requires_grad_()
        model_wrap(noise, sigmas[:1], **extra_args).square().sum().backward()
        return weight.grad


def test_training_stays_in_comfyui_and_gets_its_gradients(
    auto, settings, requests, notices, files, monkeypatch
):
    import comfy.model_management as mm
    from comfy_extras.nodes_train import TrainGuider

    monkeypatch.setattr(mm, "in_training", True)  # as TrainLoraNode does

    def trained():
        guider = TrainGuider(load(files["model"]))
        guider.set_conds(conditioning(1, 13))
        noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
        with torch.enable_grad():
            return guider.sample(
                noise, torch.zeros_like(noise), Trains(), torch.tensor([1.0, 0.0]), disable_pbar=True, seed=2
            )

    truth = trained()
    settings(True)
    requests.clear()
    assert torch.count_nonzero(truth) and relative_error(trained(), truth) <= BOUND
    assert said(notices) == [f"On one GPU: {GRADIENTS}"] and not requests["Forward"]


class Outer(comfy.samplers.CFGGuider):
    """Samples without ``CFGGuider.sample``."""

    def sample(self, noise, latent_image, sampler, sigmas, *args, **kwargs):
        self.conds = {name: [dict(cond) for cond in conds] for name, conds in self.original_conds.items()}
        shapes = [latent_image.shape]
        return self.on(noise, latent_image, sampler, sigmas, disable_pbar=True, seed=2, latent_shapes=shapes)

    def on(self, *args, **kwargs):
        return self.outer_sample(*args, **kwargs)


class Inner(Outer):
    """And without ``outer_sample``."""

    def on(self, noise, latent, sampler, sigmas, **kwargs):
        self.inner_model, self.conds, models = comfy.sampler_helpers.prepare_sampling(
            self.model_patcher, noise.shape, self.conds, self.model_options
        )
        self.model_patcher.pre_run()
        try:
            device = self.model_patcher.load_device
            return self.inner_sample(noise, latent, device, sampler, sigmas, None, None, **kwargs)
        finally:
            self.model_patcher.cleanup()
            comfy.sampler_helpers.cleanup_models(self.conds, models)


@pytest.mark.parametrize("kind", [Outer, Inner])
def test_a_guider_with_a_sample_method_of_its_own_is_told_of(auto, settings, requests, notices, files, kind):
    guider = guider_of(load(files["model"]), kind)
    guided(guider)
    assert not said(notices)
    settings(True)
    guided(guider)
    assert said(notices) == [
        f"On one GPU: {kind.__name__} has a sample method of its own, which PipeMesh does not know."
    ]
    assert notices.latest()[0].count == 1 and not requests["Forward"]


# -- the seam and the switch


def test_removed_the_host_is_as_it_was(auto):
    assert vars(comfy.samplers.CFGGuider)["sample"] is not STOCK["sample"]
    auto.remove()
    assert {name: vars(comfy.samplers.CFGGuider)[name] for name in STOCK} == STOCK


def test_another_packs_method_around_ours_stays_when_ours_is_removed(
    auto, settings, requests, files, monkeypatch
):
    ours, calls = comfy.samplers.CFGGuider.sample, []

    def theirs(self, *args, **kwargs):
        calls.append(self)
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(comfy.samplers.CFGGuider, "sample", theirs)
    settings(True)
    auto.remove()
    assert comfy.samplers.CFGGuider.sample is theirs
    run(load(files["model"]))
    assert calls and not requests["Forward"]


def sample_with_one_more(
    self, noise, latent_image, sampler, sigmas, denoise_mask=None, preview=None, callback=None
):
    self.model_patcher.prepare_model_patcher(noise)
    return self.outer_sample(noise)


def other_sample(self, noise, latent_image, sampler, sigmas):
    return self.patcher.outer_sample(noise)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("CFGGuider.sample", other_sample, "does not use model_patcher in comfy.samplers.CFGGuider.sample"),
        (
            "CFGGuider.sample",
            sample_with_one_more,
            "has preview in the place of callback in comfy.samplers.CFGGuider.sample",
        ),
        ("CFGGuider.outer_sample", None, "has no comfy.samplers.CFGGuider.outer_sample"),
        ("sample", lambda model: model, "does not use CFGGuider in comfy.samplers.sample"),
    ],
)
def test_a_host_that_samples_otherwise_is_left_alone_and_what_changed_is_named(
    monkeypatch, path, value, sentence
):
    owner, name = (
        (comfy.samplers.CFGGuider, path.partition(".")[2]) if "." in path else (comfy.samplers, path)
    )
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(value, "__module__", "comfy.samplers")
        monkeypatch.setattr(owner, name, value)
    before = dict(vars(comfy.samplers.CFGGuider))
    with pytest.raises(
        HostChanged, match=f"Auto mode does not know this ComfyUI, which {sentence}: update PipeMesh"
    ):
        GuiderSeam(lambda *_: None, lambda *_: None, StepTimes()).install()
    assert dict(vars(comfy.samplers.CFGGuider)) == before


@pytest.mark.parametrize("on", [True, False])
def test_a_host_that_auto_mode_does_not_know_is_told_of_where_it_is_switched_on(
    settings, notices, monkeypatch, on
):
    monkeypatch.delattr(comfy.samplers.CFGGuider, "outer_sample")
    settings(on)
    made = Auto(lambda: None, Switch({}, lambda: settings.file), notices)
    made.install()
    sentence = made.unavailable.english
    assert sentence.startswith("Auto mode does not know this ComfyUI") and not made.is_on()
    assert said(notices) == ([sentence] if on else [])
