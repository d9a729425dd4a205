"""A stock MODEL in, a stock MODEL out: what ComfyUI and other nodes do to a MODEL reaches the pool, and nothing else changes."""

import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from pipemesh.launcher.parity import BOUND, conditioning, relative_error, stock_model
from pipemesh.launcher.tiny import write_flux, write_lora
from pipemesh.parallel_runtime.client.host_model import PREFIX
from pipemesh.parallel_runtime.client.remote_patcher import RemotePatcher, parallelize
from pipemesh.parallel_runtime.errors import ModelError, Refused


def run(model, seed=7, steps=3, cfg=1.0, sampler="euler", positive=None, negative=None, size=(8, 10), batch=1, **kwargs):
    import comfy.sample

    latent = kwargs.pop("latent", torch.zeros(batch, 16, *size))
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, seed),
            steps,
            cfg,
            sampler,
            "simple",
            positive or conditioning(1, 13),
            negative or conditioning(2, 7),
            latent,
            disable_pbar=True,
            seed=seed,
            **kwargs,
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    flux = write_flux(folder / "flux.safetensors", hidden=256, double_blocks=2, single_blocks=2)
    other = write_flux(folder / "other.safetensors", hidden=256, double_blocks=1, single_blocks=1, seed=5)
    return {"flux": str(flux), "other": str(other), "lora": str(write_lora(folder / "lora.safetensors", flux, rank=4))}


def load(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(path)


@pytest.fixture
def client(clients):
    return clients(2)


@pytest.fixture
def requests(client, monkeypatch):
    """Counts what is asked of the pool, by message type."""
    client._ensure(lambda: False)
    pool = client.memory.pool
    seen = Counter()
    real = pool.call

    def call(request, *args, **kwargs):
        seen[type(request).__name__] += 1
        return real(request, *args, **kwargs)

    monkeypatch.setattr(pool, "call", call)
    return seen


@pytest.fixture
def pair(files, client):
    """The stock MODEL of a file and its parallel twin; the twin has its own stock object, as in a graph with two loaders."""
    return load(files["flux"]), parallelize(load(files["flux"]), client, holds_ui_device=True)


def with_lora(model, files, strength):
    import comfy.sd
    import comfy.utils

    return comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(files["lora"]), strength, 0)[0]


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2},
        {"cfg": 3.0, "batch": 3},
        {"latent": torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(1)), "denoise": 0.6},
        {"latent": torch.ones(1, 16, 8, 10), "noise_mask": torch.eye(8, 10)[None], "sampler": "dpmpp_2m_sde"},
        {"start_step": 1, "last_step": 2, "force_full_denoise": True},
        {"sampler": "dpm_adaptive"},
    ],
    ids=["batch", "batch-cfg", "denoise", "inpaint", "start-end", "adaptive"],
)
def test_what_a_sampler_may_be_asked_for_stays_exact(pair, options):
    stock, parallel = pair
    assert relative_error(run(parallel, **options), run(stock, **options)) <= BOUND


def test_regional_prompts_with_areas_and_strengths_stay_exact(pair):
    stock, parallel = pair
    region = [[tensor, {**extras, "area": (6, 5, 2, 3), "strength": 0.7}] for tensor, extras in conditioning(3, 9)]
    regional = conditioning(1, 13) + region
    assert relative_error(run(parallel, positive=regional, cfg=2.0), run(stock, positive=regional, cfg=2.0)) <= BOUND


def test_conditioning_crosses_once_per_run_and_not_again_for_the_same_prompt(pair, client):
    _stock, parallel = pair
    run(parallel, cfg=2.0, steps=4, positive=conditioning(11, 13))
    uploads = client.memory.conditioning.uploads
    run(parallel, cfg=2.0, steps=4, positive=conditioning(11, 13), seed=8)
    assert client.memory.conditioning.uploads == uploads
    run(parallel, cfg=2.0, steps=4, positive=conditioning(12, 13))
    assert client.memory.conditioning.uploads == uploads + 2  # the text and the pooled vector; guidance and the negative are known


def test_previews_and_progress_are_called_for_every_step(pair):
    stock, parallel = pair
    seen = {}
    for model in pair:
        seen[model] = []
        run(model, steps=3, callback=lambda step, x0, x, total, model=model: seen[model].append((step, total, x0.clone())))
    assert [entry[:2] for entry in seen[stock]] == [entry[:2] for entry in seen[parallel]] == [(0, 3), (1, 3), (2, 3)]
    assert max(relative_error(ours[2], theirs[2]) for ours, theirs in zip(seen[parallel], seen[stock], strict=True)) <= BOUND


def test_a_cancel_between_steps_is_the_hosts_interrupt_and_the_next_run_is_right(pair, client):
    import comfy.model_management as mm

    stock, parallel = pair
    run(parallel)
    pids = client.memory.pool.pids

    def cancel(step, *_):
        if step == 1:
            mm.interrupt_current_processing()

    with pytest.raises(mm.InterruptProcessingException):
        run(parallel, steps=5, callback=cancel)
    assert not mm.processing_interrupted()
    assert relative_error(run(parallel), run(stock)) <= BOUND
    assert client.memory.pool.pids == pids


# -- weights ---------------------------------------------------------------------------------------------------------


UI_MEMORY = """
import gc, json, sys
sys.path.insert(0, {launcher!r})
from package import register_package
register_package({root!r})
sys.path.insert(0, {comfyui!r})
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.sd
from pipemesh.launcher.devices import place
from pipemesh.launcher.pool import HostSetup, PoolHandle
from pipemesh.parallel_runtime.client.remote_model import Client
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.tests.test_waist import run

def anonymous_bytes():
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))

handle = PoolHandle(place(Layout(ulysses=1), "cpu", "gloo", ()), HostSetup(comfyui={comfyui!r}, comfy_args={{"cpu": True}}))
client = Client(handle, shares_weights=True)
run(parallelize(comfy.sd.load_diffusion_model({small!r}), client, True), steps=1)
before = anonymous_bytes()
parallel = parallelize(comfy.sd.load_diffusion_model({large!r}), client, True)
run(parallel, steps=1)
print(json.dumps([anonymous_bytes() - before, parallel.model.model_loaded_weight_memory]))
handle.close()
"""


def test_the_ui_loads_no_weights_and_keeps_no_private_copy(tmp_path, files, setup):
    large = write_flux(tmp_path / "large.safetensors", hidden=512, double_blocks=4, single_blocks=4)
    root = Path(__file__).resolve().parent.parent
    script = UI_MEMORY.format(root=str(root), launcher=str(root / "launcher"), comfyui=setup.comfyui, small=files["flux"], large=str(large))
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    grown, loaded = json.loads(answer)
    assert grown <= 0.05 * large.stat().st_size
    assert loaded == 0


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_a_stock_lora_is_applied_in_the_pool(pair, files, strength):
    stock, parallel = pair
    plain = run(stock)
    truth = run(with_lora(stock, files, strength))
    assert relative_error(plain, truth) > 0.05, "the LoRA does nothing"
    assert relative_error(run(with_lora(parallel, files, strength)), truth) <= BOUND


def test_a_change_of_lora_strength_reapplies_patches_without_reloading(pair, files, requests):
    stock, parallel = pair
    run(parallel)
    requests.clear()
    for strength in (1.0, 0.5):
        assert relative_error(run(with_lora(parallel, files, strength)), run(with_lora(stock, files, strength))) <= BOUND
    assert requests["Patch"] == 2 and requests["Load"] == requests["Release"] == 0


def test_toggling_a_lora_and_going_stock_and_back_releases_nothing(pair, files, requests):
    _stock, parallel = pair
    run(parallel)
    requests.clear()
    truth = run(parallel)
    patched = with_lora(parallel, files, 1.0)
    run(patched)
    stock_of_same_file = load(files["flux"])
    run(stock_of_same_file)
    again = run(parallel)
    run(patched)
    assert relative_error(again, truth) == 0
    assert requests["Load"] == requests["Release"] == 0


def test_the_same_loader_output_serves_stock_and_pool_in_turn(files, client, requests):
    model = load(files["flux"])
    parallel = parallelize(model, client, holds_ui_device=True)
    truth = run(load(files["flux"]))
    for _ in range(2):
        assert relative_error(run(parallel), truth) <= BOUND
        assert model.model.diffusion_model._forward.__class__.__name__ == "RemoteForward"
        assert relative_error(run(model), truth) <= BOUND, "the stock MODEL was changed by its parallel twin"
    assert model.model.model_loaded_weight_memory > 0
    run(parallel)
    assert model.model.model_loaded_weight_memory == 0, "stock weights were left behind on the UI's device"
    assert requests["Load"] <= 1 and requests["Release"] == 0, "switching between clones released the pool's copy"


def test_merged_models_are_exact(files, client):
    """ModelMergeSimple puts whole weights of another model into the patches."""
    stock, other = load(files["flux"]), load(files["flux"])
    weights = {key: weight for key, weight in other.model_state_dict(PREFIX).items() if "weight" in key}
    other.add_patches({key: ("diff", (torch.full_like(weight, 0.01),)) for key, weight in weights.items()})

    def merged(model):
        clone = model.clone()
        for key, patch in other.get_key_patches(PREFIX).items():
            clone.add_patches({key: patch}, 0.5, 0.5)
        return clone

    truth = run(merged(stock))
    assert relative_error(run(merged(parallelize(load(files["flux"]), client, True))), truth) <= BOUND


def test_two_models_stay_resident_and_switching_reloads_nothing(files, client, requests):
    first, second = (parallelize(load(files[name]), client, holds_ui_device=True) for name in ("flux", "other"))
    truths = run(load(files["flux"])), run(load(files["other"]))
    for model, truth in zip((first, second), truths, strict=True):
        assert relative_error(run(model), truth) <= BOUND
    requests.clear()
    for _ in range(2):
        for model, truth in zip((first, second), truths, strict=True):
            assert relative_error(run(model), truth) <= BOUND
    assert requests["Load"] == requests["Release"] == 0


def test_a_model_without_a_factory_goes_to_the_pool_once(client, requests):
    stock = stock_model(5, seed=3)
    parallel = parallelize(stock, client, holds_ui_device=True)
    for _ in range(2):
        assert relative_error(run(parallel), run(stock)) <= BOUND
    assert requests["Load"] == 1


def test_free_reaches_the_pool_and_the_next_run_loads_again(pair, client, requests):
    import comfy.model_management as mm

    stock, parallel = pair
    truth = run(stock)
    run(parallel)
    assert client.holds(parallel.remote.source.model)
    mm.unload_all_models()
    assert not client.holds(parallel.remote.source.model)
    assert requests["Release"] >= 1
    assert relative_error(run(parallel), truth) <= BOUND


def test_the_pool_keeps_a_model_for_as_long_as_its_loaders_output_lives(files, client, requests):
    import comfy.model_management as mm

    stock = load(files["other"])
    model = parallelize(stock, client, holds_ui_device=True).remote.source.model
    run(parallelize(stock, client, holds_ui_device=True))
    gc.collect()
    assert client.holds(model), "the sampler's own parallel MODEL is gone, the loader's is not"
    requests.clear()
    for strength in (1.0, 0.5):
        run(parallelize(with_lora(stock, files, strength), client, holds_ui_device=True))
        gc.collect()
    assert requests["Load"] == 0, "a LoRA before Parallelize costs no reload"
    mm.current_loaded_models.clear()
    del stock
    gc.collect()
    assert not client.holds(model)


def test_memory_the_host_counts_is_what_the_pool_holds_on_its_device(files, client):
    parallel = parallelize(load(files["flux"]), client, holds_ui_device=True)
    client.release(parallel.remote.source.model)
    weights = sum(p.numel() * p.element_size() for p in parallel.model.diffusion_model.parameters())
    assert (parallel.model_size(), parallel.loaded_size()) == (weights, 0)
    run(parallel)
    assert parallel.loaded_size() == weights
    assert parallel.partially_unload(torch.device("cpu"), 1) == weights
    assert parallel.loaded_size() == 0
    elsewhere = parallelize(load(files["flux"]), client, holds_ui_device=False)
    assert elsewhere.model_size() == elsewhere.loaded_size() == 0
    assert elsewhere.memory_required([1, 16, 64, 64]) == 0


# -- other people's nodes --------------------------------------------------------------------------------------------


def test_control_residuals_are_sharded_with_their_tokens(pair):
    def with_control(model):
        generator = torch.Generator().manual_seed(9)
        residuals = [torch.randn(1, 20, 256, generator=generator) * 0.3 for _ in range(3)]
        control = {"input": [residuals[0], None], "output": [residuals[1][:, :13], residuals[2]]}

        def wrapper(apply_model, options):
            c = {**options["c"], "control": {key: list(value) for key, value in control.items()}}
            return apply_model(options["input"], options["timestep"], **c)

        clone = model.clone()
        clone.set_model_unet_function_wrapper(wrapper)
        return clone

    stock, parallel = pair
    truth = run(with_control(stock))
    assert relative_error(truth, run(stock)) > 0.05, "the residuals do nothing"
    assert relative_error(run(with_control(parallel)), truth) <= BOUND


@pytest.mark.parametrize("cache_first", [True, False])
def test_easycache_works_before_or_after_and_skips_remote_calls(files, client, requests, cache_first):
    import comfy_extras.nodes_easycache as easycache

    def cached(model):
        return easycache.EasyCacheNode.execute(model, 0.5, 0.1, 0.95, False).result[0]

    truth = run(cached(load(files["flux"])), steps=8)
    model = load(files["flux"])
    parallel = parallelize(cached(model), client, True) if cache_first else cached(parallelize(model, client, True))
    requests.clear()
    assert relative_error(run(parallel, steps=8), truth) <= BOUND
    assert 0 < requests["Forward"] < 8


def test_scheduled_lora_hooks_are_applied_per_cond(pair, files):
    import comfy.hooks
    import comfy.utils

    def conds():
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 0.8, 0.0)
        return [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]

    stock, parallel = pair
    truth = run(stock, positive=conds(), cfg=2.0)
    assert relative_error(truth, run(stock, cfg=2.0)) > 0.05, "the hook does nothing"
    assert relative_error(run(parallel, positive=conds(), cfg=2.0), truth) <= BOUND
    assert relative_error(run(parallel, cfg=2.0), run(stock, cfg=2.0)) <= BOUND


def test_a_second_parallel_model_for_the_negative_prompt_runs_in_the_pool_too(files, client, requests):
    import comfy.samplers
    import comfy_extras.nodes_custom_sampler as custom

    def guided(positive_model, negative_model):
        guider = custom.Guider_DualModel(positive_model, negative_model)
        guider.set_conds(conditioning(1, 13), conditioning(2, 7))
        guider.set_cfg(3.0)
        noise = torch.randn(1, 16, 8, 10, generator=torch.Generator().manual_seed(2))
        sigmas = comfy.samplers.calculate_sigmas(positive_model.get_model_object("model_sampling"), "simple", 3)
        with torch.inference_mode():
            return guider.sample(noise, torch.zeros_like(noise), comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True, seed=2)

    truth = guided(load(files["flux"]), load(files["other"]))
    first, second = (parallelize(load(files[name]), client, True) for name in ("flux", "other"))
    requests.clear()
    assert relative_error(guided(first, second), truth) <= BOUND
    assert requests["Forward"] == 6
    requests.clear()
    assert relative_error(guided(load(files["flux"]), second), truth) <= BOUND, "a stock positive with a parallel negative"
    assert requests["Forward"] == 3


def attention_patch(q, k, v, **_):
    return {"q": q, "k": k, "v": v}


def block_replacement(args, extra):
    return extra["original_block"](args)


@pytest.mark.parametrize(
    "add, name",
    [
        (lambda m: m.set_model_attn1_patch(attention_patch), "attention_patch"),
        (lambda m: m.set_model_patch_replace(block_replacement, "dit", "double_block", 0), "block_replacement"),
        (lambda m: m.model_options["transformer_options"].update(optimized_attention_override=attention_patch), "attention_patch"),
    ],
    ids=["patch", "replacement", "attention-override"],
)
def test_an_in_block_patch_is_refused_by_name_before_anything_is_sent(pair, requests, add, name):
    stock, parallel = pair
    patched = parallel.clone()
    add(patched)
    with pytest.raises(Refused, match=f"test_waist.*{name}.*remove the node"):
        run(patched)
    assert not requests
    assert relative_error(run(parallel), run(stock)) <= BOUND


def test_object_patches_below_the_transformer_cross_if_plain_and_are_refused_by_name_if_code(pair):
    stock, parallel = pair

    def swapped(model, name, value):
        clone = model.clone()
        clone.add_object_patch(name, value)
        return clone

    epsilon = f"{PREFIX}double_blocks.0.img_norm1.eps"
    truth = run(swapped(stock, epsilon, 1.0))
    assert relative_error(truth, run(stock)) > 0.01, "the patch does nothing"
    assert relative_error(run(swapped(parallel, epsilon, 1.0)), truth) <= BOUND
    with pytest.raises(Refused, match=r"final_layer \(torch.nn.*\) is code"):
        run(swapped(parallel, f"{PREFIX}final_layer", torch.nn.Identity()))
    assert relative_error(run(parallel), run(stock)) <= BOUND


@pytest.mark.parametrize(
    "spoil, what",
    [
        (lambda m: m.set_injections("bypass", [object()]), "bypass injections"),
        (lambda m: m.add_weight_wrapper(f"{PREFIX}img_in.weight", lambda w: w), "weight wrappers"),
        (lambda m: m.set_additional_models("multigpu", [m.clone()]), "MultiGPU CFG Split"),
    ],
    ids=["injection", "weight-wrapper", "multigpu"],
)
def test_levers_the_pool_cannot_honour_are_refused_by_name(pair, spoil, what):
    _stock, parallel = pair
    clone = parallel.clone()
    spoil(clone)
    with pytest.raises(Refused, match=what):
        clone.partially_load(torch.device("cpu"))


def test_a_model_without_a_plan_is_refused_by_name(client):
    import comfy.model_patcher

    model = torch.nn.Module()
    model.diffusion_model = torch.nn.Linear(1, 1)
    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(Refused, match=r"Linear has no token plan .*flux.*leave PipeMesh Parallelize out"):
        parallelize(patcher, client, True)


def test_a_missing_checkpoint_is_named(files, client, tmp_path):
    path = write_flux(tmp_path / "gone.safetensors", hidden=128, double_blocks=1, single_blocks=1)
    model = load(str(path))
    path.unlink()
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing: put it back"):
        parallelize(model, client, True)


def test_bad_input_leaves_the_pool_usable(pair, client):
    stock, parallel = pair
    run(parallel)
    pids = client.memory.pool.pids
    wrong = [[torch.randn(1, 13, 32), extras] for _, extras in conditioning(1, 13)]
    with pytest.raises(ModelError, match="Rank 0 on cpu failed while computing"):
        run(parallel, positive=wrong)
    assert relative_error(run(parallel), run(stock)) <= BOUND
    assert client.memory.pool.pids == pids


def test_a_clone_stays_parallel_and_parallelizing_twice_changes_nothing(pair, client):
    _stock, parallel = pair
    assert isinstance(parallel.clone().clone(), RemotePatcher)
    assert parallelize(parallel, client, holds_ui_device=True) is parallel
