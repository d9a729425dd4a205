"""What several nodes attach to a MODEL together, under every method: as in stock."""

import comfy.sd
import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize

from ..fixtures import ALL
from ..kit.models import load, run, with_lora, write_lora, write_model
from ..kit.patched import ALL_WARM, execute

ULYSSES, RING, PIPEFUSION = (2, 1, 1), (1, 2, 1), (1, 1, 2)


def parallel_of(model, clients, degrees):
    return parallelize(model, clients(*degrees), 0.0, Patching(3, ALL_WARM) if degrees[2] > 1 else None)


def bypassing(model, path, strength=0.8):
    return comfy.sd.load_bypass_lora_for_models(
        model, None, comfy.utils.load_torch_file(path), strength, 0.0
    )[0]


@pytest.mark.parametrize("degrees", [ULYSSES, PIPEFUSION] if ALL else [ULYSSES], ids=str)
def test_a_bypass_lora_is_as_in_stock(files, clients, degrees):
    model = load(files["model"])
    plain = run(model)
    truth = run(bypassing(model, files["lora"]))
    assert relative_error(truth, plain) > 0.01, "the LoRA does nothing"
    parallel = parallel_of(model, clients, degrees)
    assert relative_error(run(bypassing(parallel, files["lora"])), truth) <= BOUND
    assert relative_error(run(parallel), plain) <= BOUND
    weaker = run(bypassing(parallel, files["lora"], 0.2))
    assert relative_error(weaker, plain) > 10 * BOUND < relative_error(weaker, truth)
    assert relative_error(run(bypassing(model, files["lora"])), truth) <= BOUND
    both = run(with_lora(bypassing(model, files["lora"]), files, 0.5))
    assert relative_error(run(with_lora(bypassing(parallel, files["lora"]), files, 0.5)), both) <= BOUND


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    paths = [
        write_model(folder / f"{seed}.safetensors", heads=1, blocks=(1, 1), seed=seed) for seed in (1, 2, 3)
    ]
    return [*map(str, paths), str(write_lora(folder / "lora.safetensors", paths[1], rank=4))]


@pytest.mark.parametrize("degrees", [ULYSSES, PIPEFUSION] if ALL else [PIPEFUSION], ids=str)
def test_merges_of_several_files_are_as_in_stock(three, clients, degrees):
    def merged(first, second, third):
        second = comfy.sd.load_lora_for_models(second, None, comfy.utils.load_torch_file(three[3]), 0.7, 0)[0]
        merge = execute("nodes_model_merging", "ModelMergeSimple", first, second, 0.6)
        difference = execute("nodes_model_merging", "ModelMergeSubtract", third, load(three[1]), 0.5)
        return execute(
            "nodes_model_merging",
            "ModelMergeAdd",
            execute("nodes_model_merging", "ModelMergeSimple", merge, third, 0.5),
            difference,
        )

    truth = run(merged(*map(load, three[:3])))
    assert relative_error(truth, run(load(three[0]))) > 0.05
    first, second, third = map(load, three[:3])
    assert relative_error(run(merged(parallel_of(first, clients, degrees), second, third)), truth) <= BOUND
    ours = [parallel_of(load(path), clients, degrees) for path in three[:3]]
    assert relative_error(run(merged(*ours)), truth) <= BOUND, "merged of parallelized models"


def control_net(stock, seed):
    """ComfyUI's own class around its own architecture, with random weights."""
    import comfy.controlnet
    import comfy.ops
    from comfy.ldm.flux.controlnet import ControlNetFlux

    config = {
        **stock.model.model_config.unet_config,
        "depth": 1,
        "depth_single_blocks": 1,
        "dtype": torch.float32,
    }
    net = ControlNetFlux(operations=comfy.ops.disable_weight_init, **config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return comfy.controlnet.ControlNet(net, load_device=torch.device("cpu"), extra_conds=["y", "guidance"])


@pytest.mark.parametrize("degrees", [RING, PIPEFUSION] if ALL else [RING], ids=str)
def test_chained_control_nets_of_comfyuis_own_architecture_are_as_in_stock(files, clients, degrees):
    stock = load(files["model"])
    image = torch.rand(1, 64, 80, 3, generator=torch.Generator().manual_seed(8))
    conds = conditioning(1, 13), conditioning(2, 7)
    alone = execute("", "ControlNetApplyAdvanced", *conds, control_net(stock, 1), image, 0.9, 0.0, 1.0)
    chained = execute("", "ControlNetApplyAdvanced", *alone, control_net(stock, 2), 1 - image, 0.5, 0.2, 1.0)
    truth = run(stock, cfg=3.0, positive=chained[0], negative=chained[1])
    for fewer in (conds, alone):
        assert relative_error(truth, run(stock, cfg=3.0, positive=fewer[0], negative=fewer[1])) > 0.001, (
            "a net does nothing"
        )
    parallel = parallel_of(load(files["model"]), clients, degrees)
    assert relative_error(run(parallel, cfg=3.0, positive=chained[0], negative=chained[1]), truth) <= BOUND


@pytest.mark.parametrize(("name", "degrees"), [("EasyCache", RING), ("LazyCache", PIPEFUSION)], ids=str)
def test_evaluations_that_a_step_cache_skips_are_skipped_in_the_pool(files, clients, name, degrees):
    def cached(model):
        return execute("nodes_easycache", name, model, 0.5, 0.1, 0.95, False)

    stock, counted = load(files["model"]), []
    forward = stock.model.diffusion_model._forward
    stock.add_object_patch(
        "diffusion_model._forward", lambda *args, **kwargs: (counted.append(1), forward(*args, **kwargs))[1]
    )
    truth = run(cached(stock), steps=8)
    parallel = parallel_of(load(files["model"]), clients, degrees)
    assert relative_error(run(cached(parallel), steps=8), truth) <= BOUND
    assert 0 < len(counted) < 8
    assert len(parallel.remote.pool.runs.last.evaluations) == len(counted)


@pytest.mark.parametrize("degrees", [ULYSSES, PIPEFUSION] if ALL else [ULYSSES], ids=str)
def test_a_diffusers_lora_of_the_last_layer_has_its_halves_the_other_way_round_as_in_stock(
    clients, files, degrees
):
    stock = load(files["model"])
    hidden = stock.model.diffusion_model.hidden_size
    generator = torch.Generator().manual_seed(3)
    state = {
        "transformer.norm_out.linear.lora_A.weight": torch.randn(4, hidden, generator=generator),
        "transformer.norm_out.linear.lora_B.weight": torch.randn(2 * hidden, 4, generator=generator) * 0.05,
    }

    def patched(model):
        return comfy.sd.load_lora_for_models(model, None, state, 1.0, 0)[0]

    truth = run(patched(stock))
    assert relative_error(truth, run(stock)) > 1e-2, "the LoRA does nothing"
    ours = patched(parallel_of(load(files["model"]), clients, degrees))
    assert relative_error(run(ours), truth) <= BOUND
