"""Auto mode in one process: every guider samples in the pool while the switch is on, without an
edit; what the pool cannot honour is stock's own result, with one notice that says why.
"""

import json

import comfy.sample
import comfy.samplers
import pytest
import torch
from pipemesh.launcher.commands.parity import BOUND, relative_error
from pipemesh.launcher.pool.devices import place
from pipemesh.nodes.auto.sampling import GRADIENTS, Auto
from pipemesh.nodes.auto.seam import GuiderSeam, HostChanged
from pipemesh.nodes.auto.switch import FILE, SETTING, Switch
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.settings import Choice
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout

from .conftest import ALL
from .foreign_pack import halved_keys, unet, without_plan
from .models import conditioning, load, run, with_lora

STOCK = {name: vars(comfy.samplers.CFGGuider)[name] for name in ("sample", "outer_sample")}


class SharedRuntime:
    """A runtime with one pool, that of the session. ``choices``: what was parallelized."""

    def __init__(self, client):
        self._client = client
        self.choices = []

    def default_choice(self):
        return Choice(place(Layout(ulysses=2), "cpu", "auto", ()))

    def parallelize(self, model, choice):
        self.choices.append(choice)
        return remote_patcher.parallelize(model, self._client, holds_ui_device=1.0)


@pytest.fixture
def settings(tmp_path):
    """Sets the switch, as ComfyUI does."""
    file = tmp_path / FILE

    def switch(on):
        file.write_text(json.dumps({"Comfy.Other": 1, SETTING: on}))

    switch.file = file
    return switch


@pytest.fixture
def notices():
    return Notices()


@pytest.fixture
def auto(client, settings, notices):
    made = Auto(SharedRuntime(client), Switch({}, lambda: settings.file), notices)
    made.install()
    yield made
    made.remove()


def said(notices):
    return [notice.text for notice in notices.latest()]


# -- in the pool, and back


def test_switched_on_and_off_in_turn_the_images_are_equal_and_only_those_of_on_are_of_the_pool(auto, settings, requests, files, notices):
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
        assert relative_error(image, truth) <= BOUND  # off too: weights that lie in the file's pages now round otherwise
    assert not said(notices)


def test_what_ranks_held_for_auto_mode_is_freed_once_it_is_off(auto, settings, client, files):
    model = load(files["model"])
    settings(True)
    run(model)
    assert client.session.models
    settings(False)
    run(model)
    assert not client.session.models


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
    sigmas = comfy.samplers.calculate_sigmas(guider.model_patcher.get_model_object("model_sampling"), "simple", 3)
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), comfy.samplers.sampler_object(sampler), sigmas, disable_pbar=True, seed=2)


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
def test_a_guider_made_and_sampled_while_off_is_parallel_once_it_is_on_and_keeps_what_is_its_own(auto, settings, requests, files, kind):
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

    guider = guider_of(load(files["model"]), lambda model: custom.Guider_DualModel(model, load(files["other"])))
    truth = guided(guider)
    settings(True)
    requests.clear()
    assert relative_error(guided(guider), truth) <= BOUND
    assert requests["Forward"] == 6


def test_a_parallelized_model_keeps_its_own_pool(auto, settings, client, files):
    settings(True)
    run(remote_patcher.parallelize(load(files["model"]), client, holds_ui_device=True))
    assert not auto._runtime.choices


# -- on one GPU, with a notice


def with_patch(model):
    clone = model.clone()
    clone.set_model_attn1_patch(halved_keys)
    return clone


def patched_by_a_wrapper(model):
    """A node whose wrapper sets an attention patch amid the run, from the second step on."""

    def wrapper(apply_model, options):
        c = dict(options["c"])
        if float(options["timestep"].flatten()[0]) < 0.99:
            c["transformer_options"] = {**c["transformer_options"], "patches": {"attn1_patch": [halved_keys]}}
        return apply_model(options["input"], options["timestep"], **c)

    clone = model.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


KINDS = {
    "unet": (lambda path: unet(), "UNetModel has no token plan (a UNet: its convolutions look at neighbouring pixels"),
    "no plan": (lambda path: without_plan(load(path)), "Unplanned has no token plan (no plan has been written yet"),
    "patch": (lambda path: with_patch(load(path)), "foreign_pack.halved_keys (patches/attn1_patch) runs inside the model's blocks"),
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
    assert not requests["Forward"]


def test_what_is_refused_amid_a_run_begins_anew_with_the_same_random_numbers(auto, settings, requests, notices, files):
    model, latent = patched_by_a_wrapper(load(files["model"])), torch.zeros(1, 16, 8, 10)

    def sampled():
        torch.manual_seed(1)
        noise, text = torch.randn(latent.shape), conditioning(1, 13)
        with torch.inference_mode():  # without a seed, the sampler draws from torch's own random numbers
            return comfy.sample.sample(model, noise, 3, 1.0, "euler_ancestral", "simple", text, text, latent, disable_pbar=True, seed=None)

    truth = sampled()
    assert torch.equal(sampled(), truth)
    settings(True)
    requests.clear()
    assert relative_error(sampled(), truth) <= BOUND
    assert requests["Forward"] == 1
    (notice,) = said(notices)
    assert "halved_keys" in notice


def test_a_pool_that_fails_costs_a_notice_and_no_image(auto, settings, notices, files, monkeypatch):
    def fails(*_):
        raise PoolFailed("Rank 1 on cpu was killed: run again.\nLast lines of rank 1:\n  (none)")

    model = load(files["model"])
    truth = run(model)
    settings(True)
    monkeypatch.setattr(remote_patcher.RemotePatcher, "evaluate", fails)
    assert relative_error(run(model), truth) <= BOUND
    assert said(notices) == ["On one GPU: Rank 1 on cpu was killed: run again."]


def test_stop_ends_the_run_and_starts_no_other(auto, settings, notices, files, monkeypatch):
    import comfy.model_management as mm

    def stopped(*_):
        raise mm.InterruptProcessingException

    settings(True)
    monkeypatch.setattr(remote_patcher.RemotePatcher, "evaluate", stopped)
    with pytest.raises(mm.InterruptProcessingException):
        run(load(files["model"]))
    assert not said(notices)


def test_training_stays_in_comfyui(auto, settings, notices, files):
    settings(True)
    guider = guider_of(load(files["model"]))
    auto.sample(guider, torch.ones(2), lambda: None)
    assert said(notices) == [f"On one GPU: {GRADIENTS}"]


def test_a_guider_with_a_sample_method_of_its_own_is_told_of(auto, settings, requests, notices, files):
    class OfItsOwn(comfy.samplers.CFGGuider):
        def sample(self, noise, latent_image, sampler, sigmas, *args, **kwargs):
            self.conds = {name: [dict(cond) for cond in conds] for name, conds in self.original_conds.items()}
            shapes = [latent_image.shape]
            return self.outer_sample(noise, latent_image, sampler, sigmas, disable_pbar=True, seed=2, latent_shapes=shapes)

    guider = guider_of(load(files["model"]), OfItsOwn)
    guided(guider)
    assert not said(notices)
    settings(True)
    guided(guider)
    assert said(notices) == ["On one GPU: OfItsOwn has a sample method of its own, which PipeMesh does not know."]
    assert not requests["Forward"]


# -- the seam and the switch


def test_removed_the_host_is_as_it_was(auto):
    assert vars(comfy.samplers.CFGGuider)["sample"] is not STOCK["sample"]
    auto.remove()
    assert {name: vars(comfy.samplers.CFGGuider)[name] for name in STOCK} == STOCK


def test_another_packs_method_around_ours_stays_when_ours_is_removed(auto, settings, requests, files, monkeypatch):
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


def other_sample(self, noise, latent_image, sampler, sigmas):
    return self.patcher.outer_sample(noise)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("CFGGuider.sample", other_sample, "does not use model_patcher in comfy.samplers.CFGGuider.sample"),
        ("CFGGuider.outer_sample", None, "has no comfy.samplers.CFGGuider.outer_sample"),
        ("sample", lambda model: model, "does not use CFGGuider in comfy.samplers.sample"),
    ],
)
def test_a_host_that_samples_otherwise_is_left_alone_and_what_changed_is_named(monkeypatch, path, value, sentence):
    owner, name = (comfy.samplers.CFGGuider, path.partition(".")[2]) if "." in path else (comfy.samplers, path)
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(value, "__module__", "comfy.samplers")
        monkeypatch.setattr(owner, name, value)
    before = dict(vars(comfy.samplers.CFGGuider))
    with pytest.raises(HostChanged, match=f"Auto mode does not know this ComfyUI, which {sentence}: update PipeMesh"):
        GuiderSeam(lambda *_: None, lambda *_: None).install()
    assert dict(vars(comfy.samplers.CFGGuider)) == before


@pytest.mark.parametrize(
    ("text", "on"), [('{"PipeMesh.Auto": true}', True), ('{"PipeMesh.Auto": false}', False), ("{}", False), ("[]", False)]
)
def test_the_switch_is_the_setting(tmp_path, text, on):
    file = tmp_path / FILE
    switch = Switch({}, lambda: file)
    assert switch.is_on() is False
    file.write_text(text)
    assert switch.is_on() is on


def test_while_comfyui_writes_its_settings_the_switch_is_as_it_was(settings):
    switch = Switch({}, lambda: settings.file)
    for on in (True, False):
        settings(on)
        assert switch.is_on() is on
        settings.file.write_text('{"Comfy.Ot')
        assert switch.is_on() is on


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_the_variable_counts_more_than_the_setting(settings, value, on):
    settings(not on)
    assert Switch({"PIPEMESH_AUTO": value}, lambda: settings.file).is_on() is on


def test_a_variable_that_is_neither_is_named_and_the_setting_counts(settings, caplog):
    settings(True)
    assert Switch({"PIPEMESH_AUTO": "yes"}, lambda: settings.file).is_on() is True
    assert caplog.messages == ["[PipeMesh] PIPEMESH_AUTO is yes: set it to 1 or 0."]
    assert Switch({}, lambda: None).is_on() is False
