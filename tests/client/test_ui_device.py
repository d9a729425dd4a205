"""A UI whose device is none of its ranks', and ModelPatcherDynamic, which loads weights on such a
device when they are used: what goes there and comes back.
"""

from functools import partial
from importlib import import_module

import comfy.hooks
import comfy.model_management as mm
import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, PLAIN, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import Patching, RemotePatcher, parallelize
from pipemesh.parallel_runtime.crossing.prepared_text import METHOD
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, classes_of

from ..kit.fake_device import DEVICE, ui_on_it
from ..kit.models import load, run, with_lora
from ..kit.patched import ALL_WARM, latent

CASE = Case(PLAIN, "ulysses2", "even", 4, 1.0, False, "euler")


@pytest.fixture(scope="module")
def truth(files):
    """What stock computes on the CPU: plain, and under a LoRA."""
    stock = load(files["model"])
    return run(stock), run(with_lora(stock, files, 1.0))


@pytest.mark.parametrize(
    "options",
    [
        {"cfg": 3.0, "batch": 2, "sampler": "dpmpp_2m_sde"},
        {"latent": latent(size=(8, 10)), "noise_mask": torch.ones(1, 8, 10).triu()},
    ],
    ids=["batch", "mask"],
)
def test_what_the_ui_samples_on_its_device_is_what_stock_computes(files, client, options):
    expected, seen = run(load(files["model"]), **options), []
    with ui_on_it():
        parallel = parallelize(load(files["model"]), client, holds_ui_device=0)
        assert parallel.load_device == DEVICE
        ours = run(
            parallel, **options, callback=lambda step, x0, x, total: seen.extend((x0.device, x.device))
        )
    assert relative_error(ours, expected) <= BOUND
    assert set(seen) == {DEVICE}


@pytest.mark.parametrize("together", [True, False], ids=["single-timeline", "free-running"])
def test_a_pipeline_serves_it_too(files, truth, clients, together):
    modes = []
    with ui_on_it():
        model = load(files["model"])
        if together:
            model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
        ours = run(parallelize(model, clients(1, 1, 2), 0.0, Patching(3, ALL_WARM), modes.append))
    assert relative_error(ours, truth[0]) <= BOUND
    assert modes[0].startswith("single-timeline" if together else "free-running")


def test_weights_that_stock_had_on_the_device_are_the_checkpoints_again_or_what_was_written_there(
    files, truth, client, requests
):
    with ui_on_it():
        stock = load(files["model"])
        parallel, own = parallelize(stock, client, holds_ui_device=0), stock.model.diffusion_model
        assert relative_error(run(stock), truth[0]) <= BOUND
        assert own.img_in.weight.device == DEVICE
        assert relative_error(run(parallel), truth[0]) <= BOUND
        assert own.img_in.weight.device.type == "cpu"
        assert not parallel.remote.source.weights.changed
        for model in (stock, parallel):
            assert relative_error(run(with_lora(model, files, 1.0)), truth[1]) <= BOUND
        assert relative_error(run(stock), truth[0]) <= BOUND
        requests.clear()
        assert relative_error(run(parallel), truth[0]) <= BOUND
        assert requests["SetWeightPatches"] and not requests["Load"]
        run(stock)
        own.single_blocks[0].linear1.weight.data.mul_(1.5)
        ours = run(parallel)
        assert parallel.remote.source.weights.changed == {"single_blocks.0.linear1.weight"}
        assert relative_error(ours, truth[0]) > 0.01, "the change does nothing"
        assert relative_error(ours, run(stock)) <= BOUND


def test_a_model_without_a_file_is_not_sent_again_for_having_been_on_the_device(client, requests):
    expected = sample(stock_model(CASE.heads), CASE)
    with ui_on_it():
        stock = stock_model(CASE.heads)
        parallel = parallelize(stock, client, holds_ui_device=0)
        for model in (parallel, stock, parallel):
            assert relative_error(sample(model, CASE), expected) <= BOUND
    assert requests["Load"] == 1 and not requests["SetWeightPatches"]


def test_a_dynamic_model_is_served_and_comfyui_keeps_its_books(files, truth, client):
    plain, patched = truth
    hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 1.0, 0.0)
    positive = [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]
    with ui_on_it(dynamic=True):
        stock = load(files["model"])
        assert stock.is_dynamic()
        own_mapping = stock.model.diffusion_model.img_in.weight.data_ptr()
        patchers = set(stock.model.dynamic_patchers)
        parallel = parallelize(stock, client, holds_ui_device=0)
        assert isinstance(parallel, RemotePatcher) and not parallel.is_dynamic()
        assert relative_error(run(parallel), plain) <= BOUND
        assert relative_error(run(with_lora(stock, files, 1.0)), patched) <= BOUND
        assert relative_error(run(parallel), plain) <= BOUND
        given_back = stock.model.dynamic_vbars[DEVICE].evicted
        assert relative_error(run(stock), plain) <= BOUND, "the LoRA's are taken for the plain weights"
        assert given_back, "ranks may be on the same device"
        assert relative_error(run(with_lora(parallel, files, 1.0)), patched) <= BOUND
        assert stock.model.diffusion_model.img_in.weight.data_ptr() == own_mapping
        assert stock.model.dynamic_patchers == patchers, "its pinned memory would never be given back"
        assert relative_error(run(parallel, positive=positive), patched) <= BOUND, "a scheduled LoRA"


def test_at_the_next_run_comfyui_makes_no_room_for_weights_that_a_rank_on_its_device_holds(files, client):
    """Else text encoder and VAE would be unloaded for them at every run."""
    with ui_on_it():
        parallel = parallelize(load(files["model"]), client, holds_ui_device=1.0)
        loaded = mm.LoadedModel(parallel)
        assert loaded.model_memory_required(DEVICE) == parallel.model_size() > 0
        run(parallel)
        assert loaded.model_memory_required(DEVICE) == 0
        parallel.remote.release()
        assert loaded.model_memory_required(DEVICE) == parallel.model_size()


def prepares_text(plan):
    named = (name.split(":") for name in classes_of(plan))
    return all(hasattr(getattr(import_module(module), name), METHOD) for module, name in named)


def test_text_that_a_model_prepares_itself_is_prepared_on_the_uis_device(client):
    """Its weights for that are on the CPU."""
    name = next(family.samples[0].name for family in FAMILIES if all(map(prepares_text, family.plans)))
    case, stock = Case(name, "ulysses2", "even", 5, 1.0, False, "euler"), partial(stock_model, 5, family=name)
    expected = sample(stock(), case, steps=2)
    with ui_on_it():
        ours = sample(parallelize(stock(), client, holds_ui_device=0), case, steps=2)
    assert relative_error(ours, expected) <= BOUND
