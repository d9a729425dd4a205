"""Auto mode in one process: every guider samples in the pool while the switch is on, without an
edit; what the pool cannot honour is stock's own result, with one notice that says why.
"""

from functools import partial
from types import SimpleNamespace

import comfy.model_management as mm
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


@pytest.fixture
def switched_on(settings, requests):
    """A sampling's result while auto mode is off, and the same while it is on, whose requests
    alone are counted then.
    """

    def both(sample):
        truth = sample()
        settings(True)
        requests.clear()
        return truth, sample()

    return both


@pytest.fixture
def plain(files):
    return load(files["model"])


# -- in the pool, and back


def test_switched_on_and_off_in_turn_the_images_are_equal_and_only_those_of_on_are_of_the_pool(
    auto, settings, client, requests, plain, notices
):
    """What ranks held is freed while it is off."""
    truth = run(plain, cfg=2.0)
    for number in range(50 if ALL else 3):
        settings(number % 2 == 0)
        requests.clear()
        image = run(plain, cfg=2.0)
        assert bool(requests["Forward"]) is bool(client.sessions.live.models) is (number % 2 == 0)
        # Off too: weights that lie in the file's pages now round otherwise
        assert relative_error(image, truth) <= BOUND
    assert not said(notices)


def test_a_model_that_is_being_compared_with_stock_is_on_one_gpu_and_in_the_pool_after_that(
    auto, settings, requests, notices, plain
):
    trials = {type(plain.model.diffusion_model): "is being compared"}

    def require(transformer, model):
        if transformer in trials:
            raise Refused(f"{transformer.__name__} {trials[transformer]}.")

    auto._runtime().trials = SimpleNamespace(require=require)
    settings(True)
    truth = run(plain)
    assert not requests["Forward"] and said(notices) == ["On one GPU: Flux is being compared."]
    trials.clear()
    assert relative_error(run(plain), truth) <= BOUND
    assert requests["Forward"]


def test_a_lora_and_its_strength_reach_the_pool(auto, settings, switched_on, requests, files, plain):
    for strength in (1.0, 0.3):
        settings(False)
        truth, image = switched_on(partial(run, with_lora(plain, files, strength)))
        assert relative_error(image, truth) <= BOUND and requests["SetWeightPatches"] == 1


def guided(guider):
    noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
    sampling = guider.model_patcher.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 3)
    euler = comfy.samplers.sampler_object("euler")
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), euler, sigmas, disable_pbar=True, seed=2)


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
    auto, settings, switched_on, requests, plain, kind
):
    guider = guider_of(plain, kind)
    before = dict(vars(guider))
    truth, image = switched_on(partial(guided, guider))
    assert relative_error(image, truth) <= BOUND and requests["Forward"]
    assert {name: value for name, value in vars(guider).items() if name in before} == before
    settings(False)
    requests.clear()
    assert relative_error(guided(guider), truth) <= BOUND and not requests["Forward"]


def test_both_models_of_a_guider_with_two_run_in_the_pool(auto, switched_on, requests, files, plain):
    import comfy_extras.nodes_custom_sampler as custom

    guider = guider_of(plain, lambda model: custom.Guider_DualModel(model, load(files["other"])))
    truth, image = switched_on(partial(guided, guider))
    assert relative_error(image, truth) <= BOUND and requests["Forward"] == 6


def test_a_parallelized_model_keeps_its_own_pool(auto, settings, client, plain):
    settings(True)
    run(remote_patcher.parallelize(plain, client, holds_ui_device=True))
    assert not auto._runtime().choices


# -- on one GPU, with a notice


def with_patch(model):
    clone = model.clone()
    clone.set_model_attn1_patch(halved_keys)
    return clone


KINDS = {  # what it makes of the file's MODEL -> what is said
    "unet": (lambda _: unet(), "UNetModel has no token plan (a UNet: its convolutions look at neighbour"),
    "no plan": (without_plan, "Unplanned has no token plan (no plan has been written yet"),
    "patch": (with_patch, "foreign_pack.halved_keys (patches/attn1_patch) runs inside the model's blocks"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_pool_cannot_honour_is_stocks_result_to_the_bit_with_one_notice_that_says_why(
    auto, switched_on, requests, notices, plain, kind
):
    make, sentence = KINDS[kind]
    model = make(plain)
    latent = torch.zeros(1, model.model.latent_format.latent_channels, 8, 8)
    truth, image = switched_on(lambda: run(model, cfg=2.0, latent=latent))
    assert torch.equal(image, truth) and not requests["Forward"]
    (notice,) = said(notices)
    assert notice.startswith("On one GPU: ") and sentence in notice
    assert "PipeMesh Parallelize" not in notice and "remove the node" not in notice
    assert not auto._runtime().wait.lasts, "the wait that planning began is over"


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
    told = "The rows of this batch are the frames of one video, which the model computes together,"
    assert said(notices) == [f"On one GPU: {told} and there is no other prompt for another GPU."] * 2


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
KILLED = ("Rank 1 on cpu was killed: run again.", "Last lines of rank 1:\n  its last words")
FAILING = {  # the error, how often it comes, how often it is tried -> the notice, and its detail
    "dies twice": (DIED, 2, 2, KILLED),
    "dies once": (DIED, 1, 2, None),
    "no plain data": (NotPlain("context", object()), 9, 1, None),
    "no attribute": (AttributeError("no such thing"), 9, 1, ("AttributeError: no such thing", "")),
    "no space": (OSError(28, "No space left"), 9, 1, ("OSError: [Errno 28] No space left", "")),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_pool_that_fails_costs_a_notice_and_no_image_and_the_log_has_the_last_lines_or_a_traceback(
    auto, switched_on, requests, notices, plain, monkeypatch, caplog, kind
):
    error, times, tried, told = FAILING[kind]
    truth = run(plain)
    calls = failing(monkeypatch, error, times)
    _, image = switched_on(lambda: run(plain))
    assert relative_error(image, truth) <= BOUND
    if kind == "dies once":
        assert requests["Forward"] and not said(notices), "of a fresh pool"
        return
    assert len(calls) == tried
    (notice,) = notices.latest()
    text, detail = told or (f"NotPlain: {error}", "")
    assert (notice.text, notice.detail) == (f"On one GPU: {text}", detail)
    logged = [one.exc_info and one.exc_info[1] for one in caplog.records]
    assert "its last words" in caplog.messages[-1] if error is DIED else error in logged


def test_a_pool_that_failed_is_not_tried_again_in_the_same_prompt(
    auto, settings, notices, plain, monkeypatch
):
    tried = []
    settings(True)
    calls = failing(monkeypatch, DIED)
    for prompt, node in (("first", "3"), ("first", "4"), ("second", "3")):
        with CurrentNodeContext(prompt, node):
            run(plain)
        tried.append(len(calls))
    assert tried == [2, 2, 4] and said(notices)[1] == GIVEN_UP


def test_what_is_refused_leaves_other_models_in_the_ranks(auto, settings, client, requests, plain):
    settings(True)
    run(plain)
    held = set(client.sessions.live.models)
    run(unet(), latent=torch.zeros(1, 4, 8, 8))
    assert held and held <= set(client.sessions.live.models)
    requests.clear()
    run(plain)
    assert requests["Forward"] and not requests["Load"]


def test_a_refused_guider_inside_another_leaves_the_outer_ones_model_in_the_ranks(
    auto, settings, client, requests, plain
):
    def inside(args):
        """In the last step: ComfyUI itself ends what samples one model within another's steps."""
        steps.append(args)
        if len(steps) == 3:
            held.update(client.sessions.live.models)
            run(with_patch(plain))
            assert held <= set(client.sessions.live.models)
        return args["denoised"]

    steps, held, outer = [], set(), plain.clone()
    outer.set_model_sampler_post_cfg_function(inside)
    settings(True)
    run(outer)
    assert held and len(steps) == 3 and requests["Load"] <= 1


def test_stop_is_heard_while_what_ranks_held_is_freed(auto, settings, client, plain, monkeypatch):
    settings(True)
    run(plain)
    settings(False)
    monkeypatch.setattr(mm, "processing_interrupted", lambda: True)
    monkeypatch.setattr(type(client.sessions), "settle", cancelled_where_stopped)
    with pytest.raises(mm.InterruptProcessingException):
        auto.sample(guider_of(plain), stock_run(plain, lambda: pytest.fail("it went on")))


def stock_run(model, call=lambda: None):
    given = {"noise": None, "sigmas": torch.ones(2)}
    return StockCall(call, StepTimes().watch(guider_of(model), None, None, None), given)


def cancelled_where_stopped(_self, interrupted):
    if interrupted():
        raise RunCancelled("Stop")


def test_a_model_that_a_node_has_put_on_another_device_stays_there(
    auto, settings, requests, notices, plain, monkeypatch
):
    settings(True)
    own = mm.get_torch_device()
    monkeypatch.setattr(mm, "get_torch_device", lambda: torch.device("meta"))
    with torch.inference_mode():
        auto.sample(guider_of(plain), stock_run(plain))
    assert said(notices) == [f"On one GPU: A node has put this MODEL on {own}, but ComfyUI computes on meta."]


def test_a_notice_told_again_in_one_prompt_is_one_with_a_count():
    shown = []
    notices = Notices(shown.append)
    for text in ("first", "second", "first", "first"):
        notices.tell(text)
    assert [(notice.text, notice.count) for notice in notices.latest()] == [("first", 3), ("second", 1)]
    assert [notice.text for notice in shown] == ["first", "second"]


def test_stop_ends_the_run_and_starts_no_other(auto, settings, notices, plain, monkeypatch):
    settings(True)
    calls = failing(monkeypatch, mm.InterruptProcessingException())
    with pytest.raises(mm.InterruptProcessingException):
        run(plain)
    assert len(calls) == 1 and not said(notices)


class Trains(comfy.samplers.Sampler):
    """Asks for the gradient of a weight, as TrainSampler does."""

    def sample(self, model_wrap, sigmas, extra_args, callback, noise, *args, **kwargs):
        weight = list(model_wrap.inner_model.diffusion_model.parameters())[-1].requires_grad_()
        model_wrap(noise, sigmas[:1], **extra_args).square().sum().backward()
        return weight.grad


def test_training_stays_in_comfyui_and_gets_its_gradients(
    auto, switched_on, requests, notices, files, monkeypatch
):
    from comfy_extras.nodes_train import TrainGuider

    monkeypatch.setattr(mm, "in_training", True)  # as TrainLoraNode does

    def trained():
        guider = TrainGuider(load(files["model"]))
        guider.set_conds(conditioning(1, 13))
        noise, sigmas = torch.ones(1, 16, 8, 10), torch.tensor([1.0, 0.0])
        with torch.enable_grad():
            return guider.sample(noise, 0 * noise, Trains(), sigmas, disable_pbar=True, seed=2)

    truth, ours = switched_on(trained)
    assert torch.count_nonzero(truth) and relative_error(ours, truth) <= BOUND
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
def test_a_guider_with_a_sample_method_of_its_own_is_told_of(
    auto, switched_on, requests, notices, plain, kind
):
    switched_on(partial(guided, guider_of(plain, kind)))
    (notice,) = notices.latest()
    told = "has a sample method of its own, which PipeMesh does not know."
    assert notice.text == f"On one GPU: {kind.__name__} {told}"
    assert notice.count == 1 and not requests["Forward"]


# -- the seam and the switch


def test_removed_the_host_is_as_it_was(auto):
    assert vars(comfy.samplers.CFGGuider)["sample"] is not STOCK["sample"]
    auto.remove()
    assert {name: vars(comfy.samplers.CFGGuider)[name] for name in STOCK} == STOCK


def test_another_packs_method_around_ours_stays_when_ours_is_removed(
    auto, settings, requests, plain, monkeypatch
):
    ours, calls = comfy.samplers.CFGGuider.sample, []

    def theirs(self, *args, **kwargs):
        calls.append(self)
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(comfy.samplers.CFGGuider, "sample", theirs)
    settings(True)
    auto.remove()
    assert comfy.samplers.CFGGuider.sample is theirs
    run(plain)
    assert calls and not requests["Forward"]


def sample_with_one_more(
    self, noise, latent, sampler, sigmas, denoise_mask=None, preview=None, callback=None
):
    self.model_patcher.prepare_model_patcher(noise)
    return self.outer_sample(noise)


def other_sample(self, noise, latent_image, sampler, sigmas):
    return self.patcher.outer_sample(noise)


CHANGED = [  # what of comfy.samplers, what it is now, what is said of it
    ("CFGGuider.sample", other_sample, "does not use model_patcher in"),
    ("CFGGuider.sample", sample_with_one_more, "has latent in the place of latent_image in"),
    ("CFGGuider.outer_sample", None, "has no"),
    ("sample", lambda model: model, "does not use CFGGuider in"),
]


@pytest.mark.parametrize(("path", "value", "said"), CHANGED)
def test_a_host_that_samples_otherwise_is_left_alone_and_what_changed_is_named(
    monkeypatch, path, value, said
):
    owner, name = (comfy.samplers.CFGGuider, path[10:]) if "." in path else (comfy.samplers, path)
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(value, "__module__", "comfy.samplers")
        monkeypatch.setattr(owner, name, value)
    before = dict(vars(comfy.samplers.CFGGuider))
    sentence = f"not know this ComfyUI, which {said} comfy.samplers.{path}: update PipeMesh"
    with pytest.raises(HostChanged, match=f"Auto mode does {sentence}"):
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
