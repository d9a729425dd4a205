"""What nodes do to a parallelized MODEL works as in stock, or is refused by name."""

from functools import partial
from itertools import combinations

import comfy.hooks
import comfy.ldm.modules.attention as attention
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import Patching, RemotePatcher, parallelize
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.forward import PREFIX

from ..kit.bounds import assert_honoured
from ..kit.models import load, run, with_lora, write_lora, write_model
from ..kit.patched import ALL_WARM, cloned, control_net, execute, with_object, with_option, with_override

ULYSSES, RING, PIPEFUSION = (2, 1, 1), (1, 2, 1), (1, 1, 2)
EPSILON, WEIGHT = f"{PREFIX}double_blocks.0.img_norm1.eps", f"{PREFIX}double_blocks.1.img_attn.qkv.weight"


def parallel_of(model, clients, degrees):
    return parallelize(model, clients(*degrees), 0.0, Patching(3, ALL_WARM) if degrees[2] > 1 else None)


def bypassing(files, model, strength=0.8):
    lora = comfy.utils.load_torch_file(files["lora"])
    return comfy.sd.load_bypass_lora_for_models(model, None, lora, strength, 0.0)[0]


def of_last_layer(_, model):
    """A LoRA as diffusers writes it: there the layer's halves are the other way round."""
    hidden, random = model.model.diffusion_model.hidden_size, torch.Generator().manual_seed(3)
    down, up = (torch.randn(shape, generator=random) for shape in ((4, hidden), (2 * hidden, 4)))
    layer = "transformer.norm_out.linear.lora_"
    lora = {f"{layer}A.weight": down, f"{layer}B.weight": up * 0.05}
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0)[0]


def with_parameter(_, model):
    value = model.get_model_object(WEIGHT).detach().clone()
    return with_object(model, WEIGHT, torch.nn.Parameter(value.flip(0), requires_grad=False))


def with_numbers(_, model):
    """Of two blocks, which two stages have."""
    return with_object(with_object(model, EPSILON, 1.0), f"{PREFIX}single_blocks.1.pre_norm.eps", 1.0)


def guided(_, model):
    layers = {"double_layers": "1", "single_layers": "0", "rescaling_scale": 0.5}
    return execute("nodes_slg", "SkipLayerGuidanceDiT", model, 2.0, 0.0, 0.9, **layers)


def simply_guided(_, model):
    layers = {"double_layers": "0", "single_layers": "1"}
    return execute("nodes_slg", "SkipLayerGuidanceDiTSimple", model, 0.0, 0.9, **layers)


CHANGES = {  # in turn on the same MODEL
    "bypass LoRAs": (
        bypassing,
        partial(bypassing, strength=0.2),
        lambda files, model: with_lora(bypassing(files, model), files, 0.5),
    ),
    "LoRA of the last layer": (of_last_layer,),
    "numbers, then a parameter": (with_numbers, with_parameter),
    "a parameter": (with_parameter,),
    "skip layer guidance": (guided, simply_guided),
}


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("degrees", [ULYSSES, RING, PIPEFUSION], ids=str)
def test_what_nodes_attach_is_as_in_stock(files, clients, degrees, name):
    stock, parallel = load(files["model"]), parallel_of(load(files["model"]), clients, degrees)
    sampled = partial(run, steps=2, cfg=3.0 if "guidance" in name else 1.0)
    for change in CHANGES[name]:
        assert_honoured(partial(change, files), sampled, parallel, stock)


@pytest.mark.cover(2)
@pytest.mark.parametrize("degrees", [PIPEFUSION, ULYSSES], ids=str)
def test_merges_of_several_files_are_as_in_stock(tmp_path, clients, degrees):
    paths = [str(tmp_path / f"{seed}.safetensors") for seed in (1, 2, 3)]
    for seed, path in enumerate(paths, 1):
        write_model(path, heads=1, blocks=(1, 1), seed=seed)
    lora = {"lora": str(write_lora(tmp_path / "lora.safetensors", paths[1], rank=4))}
    node = partial(execute, "nodes_model_merging")

    def merged(first, second, third):
        merge = node("ModelMergeSimple", first, with_lora(second, lora, 0.7), 0.6)
        difference = node("ModelMergeSubtract", third, load(paths[1]), 0.5)
        return run(node("ModelMergeAdd", node("ModelMergeSimple", merge, third, 0.5), difference))

    truth = merged(*map(load, paths))
    assert relative_error(truth, run(load(paths[0]))) > 0.05
    ours = [parallel_of(load(path), clients, degrees) for path in paths]
    for models in (ours, (ours[0], *map(load, paths[1:]))):
        assert relative_error(merged(*models), truth) <= BOUND


@pytest.mark.cover(2)
@pytest.mark.parametrize("degrees", [RING, PIPEFUSION], ids=str)
def test_chained_control_nets_of_comfyuis_own_architecture_are_as_in_stock(files, clients, degrees):
    stock, apply = load(files["model"]), partial(execute, "", "ControlNetApplyAdvanced")
    config = {**stock.model.model_config.unet_config, "depth": 1, "depth_single_blocks": 1}
    nets = [control_net(config | {"dtype": torch.float32}, seed) for seed in (1, 2)]
    image = torch.rand(1, 64, 80, 3, generator=torch.Generator().manual_seed(8))
    conds = conditioning(1, 13), conditioning(2, 7)
    alone = apply(*conds, nets[0], image, 0.9, 0.0, 1.0)
    chained = apply(*alone, nets[1], 1 - image, 0.5, 0.2, 1.0)

    def sampled(model, prompts=chained):
        return run(model, cfg=3.0, positive=prompts[0], negative=prompts[1])

    truth = sampled(stock)
    assert min(relative_error(truth, sampled(stock, fewer)) for fewer in (conds, alone)) > 0.001
    assert relative_error(sampled(parallel_of(load(files["model"]), clients, degrees)), truth) <= BOUND


@pytest.mark.parametrize(("name", "degrees"), [("EasyCache", RING), ("LazyCache", PIPEFUSION)], ids=str)
def test_evaluations_that_a_step_cache_skips_are_skipped_in_the_pool(files, clients, name, degrees):
    def cached(model):
        return run(execute("nodes_easycache", name, model, 0.5, 0.1, 0.95, False), steps=8)

    stock, counted = load(files["model"]), []
    forward = stock.model.diffusion_model._forward
    own = f"{PREFIX}_forward"
    stock.add_object_patch(own, lambda *args, **more: counted.append(1) or forward(*args, **more))
    truth = cached(stock)
    parallel = parallel_of(load(files["model"]), clients, degrees)
    assert relative_error(cached(parallel), truth) <= BOUND
    assert 0 < len(counted) < 8
    assert len(parallel.remote.pool.runs.last.evaluations) == len(counted)


def test_lora_hooks_are_applied_per_cond_and_as_scheduled(pair, files, requests):
    def sampled(model, schedule):
        hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 0.8, 0.0)
        keyframes = comfy.hooks.HookKeyframeGroup()
        for start, strength in schedule:
            keyframes.add(comfy.hooks.HookKeyframe(strength, start_percent=start))
        hooks.set_keyframes_on_hooks(keyframes if schedule else None)
        conds = [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]
        return run(model, positive=conds, cfg=2.0, steps=4)

    stock, parallel = pair
    truths = [run(stock, cfg=2.0, steps=4)]
    for schedule in ((), ((0.0, 1.0), (0.5, 0.2)), ((0.0, 0.2), (0.5, 1.0))):
        truths.append(sampled(stock, schedule))
        requests.clear()
        assert relative_error(sampled(parallel, schedule), truths[-1]) <= BOUND
        assert requests["SetWeightPatches"] >= len(schedule), "the strength did not change in the ranks"
    assert min(relative_error(one, other) for one, other in combinations(truths, 2)) > 0.01
    assert relative_error(run(parallel, cfg=2.0, steps=4), truths[0]) <= BOUND


def test_a_compiler_that_is_code_is_left_out_with_a_notice(pair, caplog):
    stock, parallel = pair
    compiled = parallel.clone()
    set_torch_compile_wrapper(compiled, backend=lambda graph, inputs: graph)
    assert relative_error(run(compiled), run(stock)) <= BOUND
    assert "torch.compile is left out: its backend or an option is code." in caplog.text


@pytest.mark.parametrize("by", ["a node", "the UI"])
def test_ranks_compute_in_the_dtype_that_was_chosen(pair, client, files, monkeypatch, by):
    """As a UI on a GPU resolves it too, whatever a rank's device would make of the same file."""
    stock, parallel = pair
    exact = run(stock)
    if by == "a node":
        rounded, ours = (
            execute("nodes_model_advanced", "ModelComputeDtype", one, "bf16") for one in (stock, parallel)
        )
    else:
        with monkeypatch.context() as patch:
            patch.setattr(mm, "unet_dtype", lambda *args, **kwargs: torch.float16)
            patch.setattr(mm, "unet_manual_cast", lambda *args, **kwargs: None)
            rounded = load(files["model"])
        assert rounded.model_dtype() == torch.float16
        ours = parallelize(rounded, client, True)
    rounding = relative_error(run(rounded), exact)
    assert 10 * BOUND < relative_error(run(ours), exact) <= 3 * rounding and rounding > 10 * BOUND
    assert relative_error(run(parallel), exact) <= BOUND


@pytest.mark.parametrize(
    ("when", "lora"),
    [
        ("before it is parallelized", 0),
        ("before it is sampled", 1.0),
        ("between two runs", 1.0),
        ("without a file, between two runs", 0),
    ],
)
def test_weights_that_a_node_changed_in_place_reach_the_ranks(files, client, requests, when, lora):
    @torch.inference_mode()
    def change(model):
        for block in model.model.diffusion_model.double_blocks:
            block.img_attn.qkv.weight.data[: 3 * 64].mul_(3)

    def patched(model):
        return with_lora(model, files, lora) if lora else model

    stock, model = (stock_model(2) if "without a file" in when else load(files["model"]) for _ in range(2))
    unchanged = run(patched(stock))
    mm.unload_model_and_clones(stock)  # else the change would be one of what the LoRA made of the weights
    change(stock)
    truth = run(patched(stock))
    assert relative_error(truth, unchanged) > 0.05, "the change does nothing"
    if when == "before it is parallelized":
        change(model)
    parallel = patched(parallelize(model, client, True))
    if "between two runs" in when:
        assert relative_error(run(parallel), unchanged) <= BOUND
        assert requests["Load"] == 1 or "without a file" not in when
    if when != "before it is parallelized":
        change(model)
    requests.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert requests["Load"] <= ("between two runs" not in when)
    requests.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert not requests["SetWeightPatches"], "they were sent again"
    assert relative_error(run(patched(model)), truth) <= BOUND


# -- what is refused


def their_function(*_args):
    raise AssertionError("nobody calls it")


def doubled(_, *args, **kwargs):
    return 2 * attention.attention_sub_quad(*args, **kwargs)


REFUSED = {
    "an object among the options": (
        lambda m: with_option(m, img_slice=object()),
        r"The option img_slice \(builtins\.object\) of this MODEL is no plain data and cannot be sent to the"
        " pool, where Flux may read it: remove the node",
    ),
    "a device": (
        lambda m: with_option(m, img_slice={"of": [1, torch.device("cpu")]}),
        r"The option img_slice/of/1 \(torch\.device\) of this MODEL",
    ),
    "a function": (
        lambda m: with_option(m, img_slice=their_function),
        r"The option img_slice \(.*\.their_function\) of this MODEL",
    ),
    "a function in a set": (
        lambda m: with_option(m, img_slice=frozenset((1, their_function))),
        r"The option an item of img_slice \(.*\.their_function\) of this MODEL",
    ),
    "a layer": (
        lambda m: with_object(m, f"{PREFIX}final_layer", torch.nn.Identity()),
        r"diffusion_model\.final_layer \(torch.nn.*\) is code",
    ),
    "the transformer": (
        lambda m: with_object(m, PREFIX.removesuffix("."), torch.nn.Identity()),
        r"diffusion_model \(torch.nn.*\) is code",
    ),
    "an injection": (
        lambda m: cloned(m, "set_injections", "bypass", [object()]),
        "the injection builtins.object",
    ),
    "a weight wrapper": (
        lambda m: cloned(m, "add_weight_wrapper", f"{PREFIX}img_in.weight", lambda w: w),
        "weight wrappers",
    ),
    "several GPUs": (
        lambda m: cloned(m, "set_additional_models", "multigpu", [m.clone()]),
        "MultiGPU CFG Split",
    ),
    "attention of more than its name says": (lambda m: with_override(m, doubled), "doubled"),
    "a block of a node": (
        lambda m: cloned(m, "set_model_patch_replace", lambda args, extra: extra, "dit", "double_block", 0),
        "patches_replace/dit",
    ),
}


def test_what_no_rank_can_honour_is_refused_by_name_and_the_pool_goes_on(pair):
    stock, parallel = pair
    for name, (change, says) in REFUSED.items():
        with pytest.raises(Refused, match=says):
            run(change(parallel))
            pytest.fail(name)
    plain = {"plain": [1, 2.0, torch.zeros(1)], "blocks": frozenset((3, 1)), "names": {"a", "b"}}
    assert relative_error(run(with_option(parallel, **plain)), run(stock)) <= BOUND


def test_a_missing_checkpoint_is_named(client, tmp_path):
    path = write_model(tmp_path / "gone.safetensors", heads=1, blocks=(1, 1))
    model = load(str(path))
    path.unlink()
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing: put it back"):
        parallelize(model, client, True)


def test_a_clone_stays_parallel_and_parallelizing_twice_changes_nothing(pair, client):
    _stock, parallel = pair
    assert isinstance(parallel.clone().clone(), RemotePatcher)
    assert parallelize(parallel, client, holds_ui_device=True) is parallel
