"""All clones of a MODEL share one model object: whatever ends a parallel run early, stock computes
afterwards what it computed before, on the same modules and weights.
"""

import comfy.hooks
import comfy.model_management as mm
import comfy.utils
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, conditioning, relative_error
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.client.remote_patcher import RemotePatcher, parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.forward import PREFIX

from ..kit.models import load, run, with_lora
from ..kit.patched import cloned

STEPS = 1


def put(model, name, value):
    """A clone with an object patch in the transformer."""
    return cloned(model, "add_object_patch", PREFIX + name, value)


def swapped(model, files):
    """As a node does it that reorders blocks; other names then stand for other weights."""
    is_ours, blocks = isinstance(model, RemotePatcher), model.model.diffusion_model.single_blocks
    clone = put(model, "single_blocks", torch.nn.ModuleList(reversed(blocks)))
    return run(put(clone, "double_blocks.0", torch.nn.Identity() if is_ours else Swapped(model)), steps=STEPS)


class Swapped(torch.nn.Module):
    """A block of another pack around the first one, so that all its weights have longer names."""

    def __init__(self, model):
        super().__init__()
        # Under a name of the file's, with another's weights
        self.img_attn = model.model.diffusion_model.double_blocks[1].img_attn
        self.wrapped = model.model.diffusion_model.double_blocks[0]

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


def with_eps(model, files):
    """An object patch that crosses."""
    return run(put(model, "double_blocks.0.img_norm1.eps", 1.0), steps=STEPS)


def with_weight_patches(model, files):
    return run(with_lora(model, files, 1.0), steps=STEPS)


def with_hooks(model, files):
    hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(files["lora"]), 0.8, 0.0)
    positive = [[tensor, {**extras, "hooks": hooks}] for tensor, extras in conditioning(1, 13)]
    return run(model, steps=STEPS, positive=positive)


def refused(parallel, monkeypatch):
    return put(parallel, "final_layer", torch.nn.Identity()), Refused


def refused_in_a_block(parallel, monkeypatch):
    return cloned(parallel, "set_model_attn1_patch", lambda q, k, v, **_: {"q": q, "k": k, "v": v}), Refused


def cancelled_while_loading(parallel, monkeypatch):
    def bring_up(self):
        raise mm.InterruptProcessingException

    monkeypatch.setattr(remote_patcher, "bring_up", bring_up)
    return parallel, mm.InterruptProcessingException


BEFORE = {
    "stock with swapped modules": (False, swapped),
    "stock with an object patch": (False, with_eps),
    "stock with weight patches": (False, with_weight_patches),
    "stock with hooks": (False, with_hooks),
    "pool with an object patch": (True, with_eps),
    "pool with weight patches": (True, with_weight_patches),
    "pool with hooks": (True, with_hooks),
}


def state_of(model):
    """What a run computes with: which module stands under which name, what is set on modules, all
    weights.
    """
    diffusion_model = model.model.diffusion_model
    modules = {
        name: (id(module), sorted(key for key in vars(module) if "forward" in key))
        for name, module in diffusion_model.named_modules()
    }
    return modules, {name: weight.detach().clone() for name, weight in diffusion_model.state_dict().items()}


def same(one, other):
    (modules, weights), (others, theirs) = one, other
    return (modules, weights.keys()) == (others, theirs.keys()) and all(
        torch.equal(weights[name], theirs[name]) for name in weights
    )


def mapped(files, client):
    """A MODEL that a pool has served, its state as loaded, and what stock makes of it.

    Not of one that never was: a checkpoint's pages are aligned otherwise than allocated memory,
    which some kernels round otherwise for.
    """
    stock = load(files["model"])
    loaded, never = state_of(stock), run(stock, steps=STEPS)
    run(parallelize(stock, client, holds_ui_device=True), steps=STEPS)
    truth = run(stock, steps=STEPS)
    assert relative_error(truth, never) <= BOUND / 10
    return stock, loaded, truth


@pytest.mark.cover(5)
@pytest.mark.parametrize(
    "end", [refused, refused_in_a_block, cancelled_while_loading], ids=lambda end: end.__name__
)
@pytest.mark.parametrize("before", BEFORE)
def test_stock_computes_what_it_did_before(files, client, monkeypatch, before, end):
    stock, loaded, truth = mapped(files, client)
    in_pool, runs = BEFORE[before]
    runs(parallelize(stock, client, holds_ui_device=True) if in_pool else stock, files)
    left = state_of(stock)
    parallel, error = end(parallelize(stock, client, holds_ui_device=True), monkeypatch)
    with pytest.raises(error):
        run(parallel, steps=STEPS)
    assert same(state_of(stock), left) or same(state_of(stock), loaded)
    assert torch.equal(run(stock, steps=STEPS), truth)
    mm.unload_all_models()
    assert same(state_of(stock), loaded)


@pytest.mark.cover(5)
@pytest.mark.parametrize("before", BEFORE)
def test_stock_and_pool_compute_what_they_did_after_a_run_that_ended_well(files, client, before):
    stock, _loaded, truth = mapped(files, client)
    parallel = parallelize(stock, client, holds_ui_device=True)
    in_pool, runs = BEFORE[before]
    ours = run(parallel, steps=STEPS)
    runs(parallel if in_pool else stock, files)
    assert torch.equal(run(parallel, steps=STEPS), ours)
    assert torch.equal(run(stock, steps=STEPS), truth)


def test_a_model_whose_modules_a_stock_run_has_swapped_is_the_loaders_again_once_a_pool_serves_it(
    files, client
):
    stock = load(files["model"])
    loaded, truth = state_of(stock), run(stock, steps=STEPS)
    swapped(stock, files)
    parallel = parallelize(stock, client, holds_ui_device=True)
    assert relative_error(run(parallel, steps=STEPS), truth) <= BOUND
    assert relative_error(run(stock, steps=STEPS), truth) <= BOUND / 10
    mm.unload_all_models()
    assert same(state_of(stock), loaded)


def test_a_patch_that_cannot_be_put_into_place_is_stocks_own_error_and_leaves_nothing(files, client):
    stock, loaded, truth = mapped(files, client)
    parallel = parallelize(stock, client, holds_ui_device=True)
    with pytest.raises(TypeError, match=r"cannot assign 'torch\.FloatTensor' as parameter 'weight'"):
        run(put(parallel, "img_in.weight", torch.zeros(256, 64)), steps=STEPS)
    mm.unload_all_models()
    assert same(state_of(stock), loaded)
    assert torch.equal(run(stock, steps=STEPS), truth)


def test_a_copy_with_a_model_of_its_own_is_watched_itself_and_computes_what_stock_does(pair):
    """As *Select Model Device* makes one for another GPU, of the MODEL that was parallelized."""
    stock, parallel = pair
    truth, copy = run(stock, steps=STEPS), parallel.deepclone_multigpu(parallel.load_device).clone()
    assert relative_error(run(parallel, steps=STEPS), truth) <= BOUND
    block = copy.model.diffusion_model.double_blocks[0]
    assert block is not parallel.model.diffusion_model.double_blocks[0]
    block.forward = lambda *_args, **_kwargs: None
    with pytest.raises(Refused, match=r"double_blocks\.0 of this MODEL has its method forward replaced"):
        run(copy, steps=STEPS)
    del block.forward
    assert relative_error(run(copy, steps=STEPS), truth) <= BOUND
    assert relative_error(run(parallel, steps=STEPS), truth) <= BOUND
