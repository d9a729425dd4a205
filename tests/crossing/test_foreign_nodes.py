"""Other packs' nodes on a parallelized MODEL: what they set on it works, or is refused by name."""

from itertools import combinations

import comfy.model_management as mm
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, PLAIN, Case, conditioning, relative_error, sample, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import Patching, RemotePatcher, parallelize
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.forward import PREFIX

from ..kit.models import load, run, with_lora, write_model
from ..kit.patched import ALL_WARM, execute


def test_lora_hooks_are_applied_per_cond_and_as_scheduled(pair, files, requests):
    import comfy.hooks
    import comfy.utils

    def conds(*schedule):
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 0.8, 0.0)
        keyframes = comfy.hooks.HookKeyframeGroup()
        for start, strength in schedule:
            keyframes.add(comfy.hooks.HookKeyframe(strength, start_percent=start))
        hooks.set_keyframes_on_hooks(keyframes if schedule else None)
        return [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]

    stock, parallel = pair
    truths = []
    for schedule in ((), ((0.0, 1.0), (0.5, 0.2)), ((0.0, 0.2), (0.5, 1.0))):
        truths.append(run(stock, positive=conds(*schedule), cfg=2.0, steps=4))
        requests.clear()
        assert relative_error(run(parallel, positive=conds(*schedule), cfg=2.0, steps=4), truths[-1]) <= BOUND
        assert requests["SetWeightPatches"] >= len(schedule), "the strength did not change in the ranks"
    plain = run(stock, cfg=2.0, steps=4)
    assert min(relative_error(one, other) for one, other in combinations([plain, *truths], 2)) > 0.01, (
        "a schedule does nothing"
    )
    assert relative_error(run(parallel, cfg=2.0, steps=4), plain) <= BOUND


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
    for name in (f"{PREFIX}final_layer", PREFIX.removesuffix(".")):
        with pytest.raises(Refused, match=rf"{name} \(torch.nn.*\) is code"):
            run(swapped(parallel, name, torch.nn.Identity()))
    assert relative_error(run(parallel), run(stock)) <= BOUND


def test_a_parameter_as_object_patch_crosses(pair):
    name = f"{PREFIX}double_blocks.1.img_attn.qkv.weight"

    def swapped(model):
        clone = model.clone()
        value = model.get_model_object(name).detach().clone()
        clone.add_object_patch(name, torch.nn.Parameter(value.flip(0), requires_grad=False))
        return clone

    stock, parallel = pair
    truth = run(swapped(stock))
    assert relative_error(truth, run(stock)) > 0.01, "the patch does nothing"
    assert relative_error(run(swapped(parallel)), truth) <= BOUND
    assert relative_error(run(parallel), run(stock)) <= BOUND


def test_a_compiler_that_is_code_is_left_out_with_a_notice(pair, caplog):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    stock, parallel = pair
    compiled = parallel.clone()
    set_torch_compile_wrapper(compiled, backend=lambda graph, inputs: graph)
    assert relative_error(run(compiled), run(stock)) <= BOUND
    assert "torch.compile is left out: its backend or an option is code." in caplog.text


def test_a_models_computing_dtype_is_the_ranks_too(pair):
    stock, parallel = pair
    exact, truth = run(stock), run(execute("nodes_model_advanced", "ModelComputeDtype", stock, "bf16"))
    rounding = relative_error(truth, exact)
    assert rounding > 10 * BOUND, "the node does nothing"
    ours = run(execute("nodes_model_advanced", "ModelComputeDtype", parallel, "bf16"))
    assert 10 * BOUND < relative_error(ours, exact) <= 3 * rounding
    assert relative_error(run(parallel), exact) <= BOUND


def test_ranks_compute_in_the_dtypes_that_the_ui_resolved(files, client, monkeypatch):
    """As a UI on a GPU resolves them, whatever a rank's own device would make of the same file."""
    exact = run(load(files["model"]))
    monkeypatch.setattr(mm, "unet_dtype", lambda *args, **kwargs: torch.float16)
    monkeypatch.setattr(mm, "unet_manual_cast", lambda *args, **kwargs: None)
    stock = load(files["model"])
    monkeypatch.undo()
    assert stock.model_dtype() == torch.float16
    rounding = relative_error(run(stock), exact)
    assert 10 * BOUND < relative_error(run(parallelize(stock, client, True)), exact) <= 3 * rounding


@pytest.mark.parametrize(
    ("when", "lora"),
    [("before it is parallelized", 0), ("before it is sampled", 1.0), ("between two runs", 1.0)],
)
def test_weights_that_a_node_changed_in_place_reach_the_ranks(files, client, requests, when, lora):
    @torch.inference_mode()
    def change(model):
        for block in model.model.diffusion_model.double_blocks:
            block.img_attn.qkv.weight.data[: 3 * 64].mul_(3)

    def patched(model):
        return with_lora(model, files, lora) if lora else model

    stock, model = load(files["model"]), load(files["model"])
    unchanged = run(patched(stock))
    mm.unload_model_and_clones(stock)  # else the change would be one of what the LoRA made of the weights
    change(stock)
    truth = run(patched(stock))
    assert relative_error(truth, unchanged) > 0.05, "the change does nothing"
    if when == "before it is parallelized":
        change(model)
    parallel = patched(parallelize(model, client, True))
    if when == "between two runs":
        assert relative_error(run(parallel), unchanged) <= BOUND
    if when != "before it is parallelized":
        change(model)
    requests.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert requests["Load"] <= (when != "between two runs")
    requests.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert not requests["SetWeightPatches"], "they were sent again"
    assert relative_error(run(patched(model)), truth) <= BOUND


def test_a_model_without_a_file_that_is_changed_after_it_was_sent_is_right(client, requests):
    stock, model = (stock_model(4) for _ in "ab")
    case = Case(PLAIN, "ulysses2", "even", 4, 1.0, False, "euler")
    parallel = parallelize(model, client, True)
    assert relative_error(sample(parallel, case), sample(stock, case)) <= BOUND
    for changed in (stock, model):
        changed.model.diffusion_model.img_in.weight.data.mul_(1.5)
    assert relative_error(sample(parallel, case), sample(stock, case)) <= BOUND
    assert requests["Load"] == 1


def test_stages_take_what_belongs_to_their_blocks(files, clients):
    """Object patches and changed weights of blocks that another stage has."""

    def changed(model):
        clone = model.clone()
        clone.add_object_patch(f"{PREFIX}double_blocks.0.img_norm1.eps", 1.0)
        clone.add_object_patch(f"{PREFIX}single_blocks.1.pre_norm.eps", 1.0)
        return clone

    stock, model = load(files["model"]), load(files["model"])
    before = run(stock)
    for one in (stock, model):
        for block in one.model.diffusion_model.single_blocks:
            block.linear1.weight.data.mul_(1.3)
    truth = run(changed(stock))
    assert relative_error(truth, before) > 0.05
    parallel = parallelize(model, clients(1, 1, 2), 0.0, Patching(3, ALL_WARM))
    assert relative_error(run(changed(parallel)), truth) <= BOUND


@pytest.mark.parametrize(
    "spoil, what",
    [
        (lambda m: m.set_injections("bypass", [object()]), "the injection builtins.object"),
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
    with pytest.raises(Refused, match=r"Linear has no token plan .*run this sampler on one GPU"):
        parallelize(patcher, client, True)


def test_a_missing_checkpoint_is_named(files, client, tmp_path):
    path = write_model(tmp_path / "gone.safetensors", heads=1, blocks=(1, 1))
    model = load(str(path))
    path.unlink()
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing: put it back"):
        parallelize(model, client, True)


def test_a_clone_stays_parallel_and_parallelizing_twice_changes_nothing(pair, client):
    _stock, parallel = pair
    assert isinstance(parallel.clone().clone(), RemotePatcher)
    assert parallelize(parallel, client, holds_ui_device=True) is parallel
