"""A stock MODEL in, a stock MODEL out: what ComfyUI and other nodes do to a MODEL reaches the pool,
and nothing else changes.
"""

import ctypes
import gc
from functools import partial

import comfy.model_management as mm
import comfy.sampler_helpers
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client.remote_patcher import parallelize

from ..kit.bounds import assert_same
from ..kit.models import load, run, with_lora, write_model

# -- a run


@pytest.mark.parametrize(
    "options",
    [
        {"cfg": 3.0, "batch": 3},
        {"latent": torch.ones(1, 16, 8, 10), "noise_mask": torch.eye(8, 10)[None], "sampler": "dpmpp_2m_sde"},
        {"start_step": 1, "last_step": 2, "force_full_denoise": True},
    ],
    ids=["batch-cfg", "inpaint", "start-end"],
)
def test_what_a_sampler_may_be_asked_for_stays_exact(pair, options):
    stock, parallel = pair
    assert_same(partial(run, **options), parallel, stock)


def test_conditioning_in_ranks_is_told_with_their_memory_and_goes_at_the_runs_end(pair, client):
    """ComfyUI counts it where ranks are on its own device."""
    _stock, parallel = pair
    texts, seen = conditioning(21, 300), []
    run(
        parallel,
        positive=texts,
        steps=2,
        callback=lambda *_: seen.append((parallel.loaded_size(), client.sessions.live.pool.memory)),
    )
    size, memory = seen[-1]
    kept = [one.conditioning for one in memory]
    assert min(kept) > texts[0][0].nbytes and size == parallel.loaded_size() + max(kept)
    assert [one.conditioning for one in client.sessions.live.pool.memory] == [0, 0]


# -- weights


def anonymous_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))


def test_the_ui_keeps_the_one_copy_of_the_weights_that_comfyui_loaded(tmp_path, files, client):
    large = write_model(tmp_path / "large.safetensors", heads=4, blocks=(4, 4))
    run(parallelize(load(files["model"]), client, True), steps=1)
    before = anonymous_bytes()
    parallel = parallelize(load(str(large)), client, True)
    run(parallel, steps=1)
    assert anonymous_bytes() - before <= 1.2 * large.stat().st_size
    assert parallel.model.model_loaded_weight_memory == 0


def test_toggling_a_lora_and_going_stock_and_back_releases_nothing(pair, files, requests):
    _stock, parallel = pair
    run(parallel)
    requests.clear()
    truth, patched = run(parallel), with_lora(parallel, files, 1.0)
    for model in (patched, load(files["model"])):
        run(model)
    again = run(parallel)
    run(patched)
    assert relative_error(again, truth) == 0
    assert requests["Load"] == requests["Release"] == 0


def test_the_same_loader_output_serves_stock_and_pool_in_turn(files, client, requests):
    model = load(files["model"])
    parallel = parallelize(model, client, holds_ui_device=True)
    truth = run(load(files["model"]))
    for _ in range(2):
        assert relative_error(run(parallel), truth) <= BOUND
        assert model.model.diffusion_model._forward.__class__.__name__ == "RemoteForward"
        assert relative_error(run(model), truth) <= BOUND, "the stock MODEL was changed"
    assert model.model.model_loaded_weight_memory > 0
    run(parallel)
    assert model.model.model_loaded_weight_memory == 0, "stock weights were left behind on the UI's device"
    assert requests["Load"] <= 1 and requests["Release"] == 0, "switching released the pool's copy"


def test_free_reaches_the_pool_when_the_samplers_own_clone_is_gone(files, client, requests):
    """A sampler node parallelizes its input itself: after the run only the loader's stock MODEL is
    left.
    """
    stock = load(files["model"])
    truth = run(stock)
    mm.unload_all_models()
    for strength in (None, 0.7, 0.3):
        given = with_lora(stock, files, strength) if strength else stock
        parallel = parallelize(given, client, holds_ui_device=True)
        model = parallel.remote.model
        run(parallel)
        share = parallel.loaded_size()
        del parallel, given  # and the clone with the LoRA with it, as when its strength is changed
        gc.collect()
        assert client.residency.held(model)
        assert not any(loaded.is_dead() for loaded in mm.current_loaded_models)
        assert sum(loaded.model_loaded_memory() for loaded in mm.current_loaded_models) == share > 0
        mm.unload_all_models()
        assert not client.residency.held(model)
    assert relative_error(run(parallelize(stock, client, holds_ui_device=True)), truth) <= BOUND


def test_the_pool_keeps_a_model_for_as_long_as_its_loaders_output_lives(files, client, requests):
    stock = load(files["other"])
    model = parallelize(stock, client, holds_ui_device=True).remote.model
    ours = run(parallelize(stock, client, holds_ui_device=True))
    gc.collect()
    assert client.residency.held(model), "the sampler's own parallel MODEL is gone, the loader's is not"
    requests.clear()
    assert relative_error(ours, run(stock)) <= BOUND
    for strength in (1.0, 0.5):
        run(parallelize(with_lora(stock, files, strength), client, holds_ui_device=True))
        gc.collect()
    assert torch.equal(run(parallelize(stock, client, holds_ui_device=True)), ours)
    assert requests["Load"] == requests["Release"] == 0, "neither stock nor a LoRA costs a reload"
    mm.current_loaded_models.clear()
    del stock
    gc.collect()
    assert not client.residency.held(model)


def test_memory_the_host_counts_is_what_the_pool_holds_on_its_device(files, client):
    parallel = parallelize(load(files["model"]), client, holds_ui_device=True)
    client.residency.release(parallel.remote.model)
    weights = sum(p.numel() * p.element_size() for p in parallel.model.diffusion_model.parameters())
    assert (parallel.model_size(), parallel.loaded_size()) == (weights, 0)
    run(parallel)
    assert parallel.loaded_size() == weights
    assert parallel.partially_unload(torch.device("cpu"), 1) == weights
    assert parallel.loaded_size() == 0
    elsewhere = parallelize(load(files["model"]), client, holds_ui_device=False)
    assert elsewhere.model_size() == elsewhere.loaded_size() == 0


def test_the_host_makes_room_for_the_activations_of_ranks_on_its_device_alone(files, client, monkeypatch):
    estimated, real, stock = [], comfy.sampler_helpers.estimate_memory, load(files["model"])

    def noted(model, shape, conds):
        estimated.append(real(model, shape, conds)[0])
        return real(model, shape, conds)

    half, none = (parallelize(stock, client, holds_ui_device=True, activations=share) for share in (0.5, 0.0))
    monkeypatch.setattr(comfy.sampler_helpers, "estimate_memory", noted)
    for model in (stock, half, parallelize(half, client, holds_ui_device=True), none):
        run(model, batch=2)
    whole = estimated[0]
    assert whole > 0 and estimated == [whole, whole / 2, whole / 2, 0]
