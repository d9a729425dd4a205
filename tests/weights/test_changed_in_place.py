"""Packs that change a model behind ComfyUI's back: found and named, whenever they do it.

Each is imitated from what it is known to do, under a name like its own.
"""

import functools
import gc
import types
import weakref
from copy import deepcopy

import comfy.ldm.flux.layers as layers
import comfy.ldm.flux.math
import comfy.ldm.flux.model
import comfy.ldm.modules.attention as attention
import comfy.lora
import comfy.model_management as mm
import comfy.ops
import comfy.weight_adapter
import einops
import pytest
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock
from comfy.ldm.flux.model import Flux
from comfy.patcher_extension import WrappersMP
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.watch import host_code
from pipemesh.parallel_runtime.watch.attributes import Attributes, is_unchanged
from pipemesh.parallel_runtime.watch.model_changes import Watch, require_unchanged
from pipemesh.parallel_runtime.weights import comparison

from ..kit.models import load, run, with_lora
from ..kit.patched import cloned, wrapped


def nag_forward(self, x, *args, **kwargs):
    return torch.zeros_like(x)


def teacache_forward(self, *args, **kwargs):
    return Flux.forward_orig(self, *args, **kwargs)


def block_forward(self, *args, **kwargs):
    return DoubleStreamBlock.forward(self, *args, **kwargs)


def layer_hook(*args):
    return None


class ReFlux(Flux):
    """As RES4LYF's patchers make of a Flux."""


class ReDoubleStreamBlock(DoubleStreamBlock):
    """Likewise of its blocks."""


def set_on(thing, name, function):
    setattr(thing, name, types.MethodType(function, thing))


IN_PLACE = {
    "PuLID-Flux": (lambda dm: set_on(dm, "forward_orig", nag_forward), "method forward_orig .*nag_forward"),
    "NAG": (lambda dm: set_on(dm, "forward", nag_forward), "its method forward .*nag_forward"),
    "a block's forward": (
        lambda dm: set_on(dm.double_blocks[1], "forward", block_forward),
        "diffusion_model.double_blocks.1 .*its method forward .*block_forward",
    ),
    "a hook": (lambda dm: dm.img_in.register_forward_hook(layer_hook), "img_in .*forward hook .*layer_hook"),
    "a pre-hook": (
        lambda dm: dm.img_in.register_forward_pre_hook(layer_hook),
        "img_in .*forward hook .*layer_hook",
    ),
    "RES4LYF": (lambda dm: setattr(dm, "__class__", ReFlux), "ReFlux has no token plan"),
    "RES4LYF's blocks": (
        lambda dm: setattr(dm.double_blocks[0], "__class__", ReDoubleStreamBlock),
        "double_blocks.0 .*class of another pack .*ReDoubleStreamBlock",
    ),
    "torch.compile": (lambda dm: dm.compile(), "_compiled_call_impl"),
}


def own_attention(q, *args, **kwargs):
    return torch.zeros_like(q)


@functools.wraps(comfy.ldm.flux.math.attention)
def wrapped_attention(*args, **kwargs):
    return own_attention(*args, **kwargs)


FOR_ALL = {  # what is replaced, by what, and how a sentence says it
    "the model's forward": (Flux, "_forward", nag_forward, "flux.model.Flux._forward was replaced .*nag_"),
    "a block's forward": (DoubleStreamBlock, "forward", block_forward, "layers.DoubleStreamBlock.* .*block_"),
    "a class method": (Flux, "load_state_dict", classmethod(nag_forward), "Flux.load_state_dict .*nag_"),
    "a layer's forward": (
        comfy.ops.disable_weight_init.Linear,
        "forward_comfy_cast_weights",
        nag_forward,
        "Linear.forward_comfy",
    ),
    "a function of the module": (layers, "attention", wrapped_attention, "flux.layers.attention .*attention"),
    "a function behind it": (
        comfy.ldm.flux.math,
        "optimized_attention",
        own_attention,
        "flux.math.optimized_attention .*own_attention",
    ),
    "one of ComfyUI's own": (
        comfy.ldm.flux.math,
        "optimized_attention",
        attention.attention_split,
        "flux.math.optimized_attention .*attention_split",
    ),
    "a class": (
        comfy.ldm.flux.model,
        "SingleStreamBlock",
        ReDoubleStreamBlock,
        "model.SingleStreamBlock .*ReDoubleStreamBlock",
    ),
}
OF_OTHERS = {
    "an added name": (attention, "own_attention", own_attention),
    "a class of UNets": (attention, "BasicTransformerBlock", ReDoubleStreamBlock),
    "a method of UNets": (attention.SpatialTransformer, "forward", block_forward),
    "the source of an imported function": (einops, "rearrange", own_attention),
}


@pytest.fixture(scope="module")
def flux():
    return stock_model(1).model.diffusion_model


@pytest.mark.parametrize("name", FOR_ALL)
def test_a_function_of_comfyuis_own_that_a_pack_replaced_for_all_models_is_named(flux, monkeypatch, name):
    *replaced, what = FOR_ALL[name]
    require_unchanged(flux)
    watch = Watch(flux)
    watch.check()
    monkeypatch.setattr(*replaced, raising=False)
    sentence = f"^ComfyUI's comfy.*{what}.*remove the node or the pack .*bypass PipeMesh Parallelize"
    for check in (lambda: require_unchanged(flux), watch.check):
        with pytest.raises(Refused, match=sentence):
            check()
    monkeypatch.undo()
    require_unchanged(flux)
    watch.check()


def test_code_of_comfyuis_that_its_file_does_not_have_is_named_with_the_file(flux, monkeypatch):
    """As after an update of ComfyUI that runs, and of a pack that exchanges a function's code."""
    monkeypatch.setattr(DoubleStreamBlock.forward, "__code__", block_forward.__code__)
    sentence = r"flux/layers.py was edited after .* \(DoubleStreamBlock.forward differs\).*: restart ComfyUI"
    with pytest.raises(Refused, match=sentence):
        require_unchanged(flux)
    monkeypatch.undo()
    require_unchanged(flux)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_a_pack_replaced_and_this_transformer_does_not_use_is_let_be(flux, monkeypatch, name):
    watch = Watch(flux)
    monkeypatch.setattr(*OF_OTHERS[name], raising=False)
    require_unchanged(flux)
    watch.check()


def test_a_run_is_refused_where_a_pack_replaced_a_function_for_all_models(pair, requests, monkeypatch):
    """The transformer's own forward runs in ComfyUI, so one that goes on to the remote one is
    honoured (tests/client/test_waist.py), and one that does not is named.
    """
    _stock, parallel = pair
    with monkeypatch.context() as patch:
        patch.setattr(Flux, "forward", nag_forward)
        with pytest.raises(Refused, match=r"evaluated by .*nag_forward without its transformer's forward"):
            run(parallel)
    monkeypatch.setattr(Flux, "forward_orig", teacache_forward)
    with pytest.raises(Refused, match=r"Flux.forward_orig was replaced .*teacache_forward"):
        run(parallel)
    assert not requests["Forward"]


class PackAdapter(comfy.weight_adapter.LoRAAdapter):
    """An adapter of another pack's."""


def test_a_pack_that_replaced_what_applies_weight_patches_is_refused_only_where_a_patch_is_its_own(
    pair, files, requests, monkeypatch
):
    """As Fooocus' inpainting does: what is not its own goes to ComfyUI's function."""
    apply = comfy.lora.calculate_weight
    key, value = "diffusion_model.img_in.weight", torch.zeros(1)
    stock, parallel = pair
    truth = run(with_lora(stock, files, 1.0))
    monkeypatch.setattr(comfy.lora, "calculate_weight", lambda *args, **kwargs: apply(*args, **kwargs))
    assert relative_error(run(with_lora(parallel, files, 1.0)), truth) <= BOUND
    requests.clear()
    for what, patch in (
        ("fooocus", ("fooocus", (value,))),
        (".*PackAdapter", PackAdapter({*()}, (value,) * 6)),
    ):
        says = f"weight patch of {key} is of the type {what}, .*run this sampler on one GPU"
        with pytest.raises(Refused, match=says):
            run(cloned(parallel, "add_patches", {key: patch}))
    assert not requests["Forward"]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("NAG", "before it is parallelized"),
        ("PuLID-Flux", "before it is sampled"),
        ("a block's forward", "between two runs"),
        ("RES4LYF", "between two runs"),
    ],
)
def test_what_is_changed_in_place_is_named_before_anything_is_computed(files, client, requests, name, when):
    change, what = IN_PLACE[name]
    model, parallel = load(files["model"]), None
    if when != "before it is parallelized":
        parallel = parallelize(model, client, True)
    if when == "between two runs":
        run(parallel, steps=1)
    requests.clear()
    change(model.model.diffusion_model)
    with pytest.raises(Refused, match=f"{what}.*(leave|bypass) PipeMesh Parallelize"):
        run(parallel or parallelize(model, client, True), steps=1)
    assert not requests["Forward"]


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "RES4LYF"])
def test_each_change_in_place_is_named_at_first_and_while_the_model_samples(name):
    change, what = IN_PLACE[name]
    model = stock_model(1).model.diffusion_model
    watch = Watch(model)
    watch.check()
    change(model)
    for check in (lambda: require_unchanged(model), watch.check):
        with pytest.raises(Refused, match=f"{what}.*(leave|bypass) PipeMesh Parallelize"):
            check()


def test_a_method_that_was_put_back_and_is_replaced_again_is_named(files, client, requests):
    """As packs do that are switched off and on: the module keeps a method of its own meanwhile."""
    model = load(files["model"])
    block = model.model.diffusion_model.double_blocks[0]
    block.forward = own = block.forward
    parallel = parallelize(model, client, True)
    run(parallel, steps=1)
    requests.clear()
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(Refused, match="has its method forward replaced in place"):
        run(parallel, steps=1)
    assert not requests["Forward"]


def test_what_is_unchanged_is_looked_through_in_the_first_run_alone(files, client, monkeypatch):
    parallel = parallelize(load(files["model"]), client, True)
    run(parallel, steps=1)
    walks = []
    for module, name in ((host_code, "_functions"), (comparison, "stored_bytes")):
        counted = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, counted=counted: walks.append(1) or counted(*args))
    run(parallel, steps=1)
    run(parallel.clone(), steps=1)
    assert not walks


class CachedTransformerBlocks(torch.nn.ModuleList):
    """As WaveSpeed's: one in place of all blocks."""


def within_a_wrapper(change, put_back):
    """A wrapper that changes the transformer around each call of the model, and puts it back."""

    def wrapper(apply_model, options):
        model = apply_model.__self__.diffusion_model
        kept = change(model)
        try:
            return apply_model(options["input"], options["timestep"], **options["c"])
        finally:
            put_back(model, kept)

    return wrapper


def swap_blocks(model):
    kept, swapped = model.double_blocks, CachedTransformerBlocks(model.double_blocks)
    model.double_blocks = torch.nn.ModuleList([swapped])
    return kept


def replace_forward(model):
    kept = model._forward
    set_on(model, "_forward", nag_forward)
    return kept


WITHIN = {
    "TeaCache": (
        lambda dm: set_on(dm, "forward_orig", teacache_forward),
        lambda dm, _: delattr(dm, "forward_orig"),
        "forward_orig .*teacache_forward.*use EasyCache",
    ),
    "WaveSpeed": (
        swap_blocks,
        lambda dm, kept: setattr(dm, "double_blocks", kept),
        "double_blocks .*was swapped .*CachedTransformerBlocks.*use EasyCache",
    ),
    "blocks left out": (
        lambda dm: dm.single_blocks._modules.popitem(),
        lambda dm, kept: dm.single_blocks._modules.update([kept]),
        "single_blocks.1 .*was swapped",
    ),
    "the very method": (
        replace_forward,
        lambda dm, kept: setattr(dm, "_forward", kept),
        "method _forward .*nag_forward",
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_a_wrapper_changes_while_the_model_samples_is_named(pair, requests, name):
    *change, what = WITHIN[name]
    stock, parallel = pair
    with pytest.raises(Refused, match=f"{what}.*bypass PipeMesh Parallelize"):
        run(wrapped(parallel, within_a_wrapper(*change)))
    assert not requests["Forward"]
    assert relative_error(run(parallel), run(stock)) <= BOUND


def own_sampler(apply_model, options):
    return options["input"]


def own_conds(arguments):
    return [torch.zeros_like(arguments["input"]) for _ in arguments["conds"]]


def own_model(x, *args, **kwargs):
    return torch.zeros_like(x)


def test_a_run_that_asks_the_pool_for_nothing_is_refused_by_the_name_of_the_wrapper(pair, requests):
    calls = []

    def own_transformer(executor, x, *args, **kwargs):
        calls.append(x)
        return torch.zeros_like(x)

    stock, parallel = pair
    of_conds = parallel.clone()
    of_conds.model_options["sampler_calc_cond_batch_function"] = own_conds
    for clone, name in (
        (wrapped(parallel, own_sampler), "sampler"),
        (cloned(parallel, "add_wrapper", WrappersMP.DIFFUSION_MODEL, own_transformer), "transformer"),
        (of_conds, "conds"),
        (cloned(parallel, "add_object_patch", "apply_model", own_model), "model"),
    ):
        with pytest.raises(Refused, match=f"evaluated by .*own_{name} without .* nothing ran in the pool"):
            run(clone)
    assert not requests["Forward"]
    assert len(calls) == 1, "it is refused at once, not behind the last step"
    assert relative_error(run(parallel), run(stock)) <= BOUND


@pytest.mark.host
@pytest.mark.parametrize("room", [1, 1 << 40], ids=["in part", "whole"])
def test_what_comfyui_notes_of_a_model_that_it_loads_is_no_change(files, room):
    model = with_lora(load(files["model"]), files, 1.0)
    model.load(torch.device("cpu"), lowvram_model_memory=room)
    assert Attributes().changed(model.model) == {}


def test_a_model_that_was_sampled_and_dropped_is_gone_at_once(files, client):
    parallel = parallelize(load(files["model"]), client, True)
    run(parallel, steps=1)
    transformer = weakref.ref(parallel.model.diffusion_model)
    mm.current_loaded_models.clear()
    gc.collect()
    gc.disable()
    try:
        del parallel
        assert transformer() is None
    finally:
        gc.enable()


def test_attributes_that_are_no_code_are_let_be():
    model = stock_model(1).model.diffusion_model
    watch = Watch(model)
    model.pulid_data, model.double_blocks[0].step = {}, 3
    watch.check()
    require_unchanged(model)
    set_on(model.double_blocks[0], "forward", block_forward)
    with pytest.raises(Refused, match="block_forward"):
        watch.check()


def set_numbers(model):
    model.pe_embedder.theta = 100
    model.params.txt_ids_dims, model.params.axes_dim = [1], list(model.params.axes_dim)
    for block in model.double_blocks:
        block.img_norm1.eps = 0.5


def test_attributes_that_were_changed_in_place_are_the_ranks_too(pair, files):
    stock, (plain, parallel) = load(files["model"]), pair
    ours, truth = parallel.model.diffusion_model, run(plain)
    kept = deepcopy(ours.params), ours.pe_embedder.theta
    set_numbers(stock.model.diffusion_model)
    set_numbers(ours)
    changed = run(stock)
    assert relative_error(changed, truth) > 100 * BOUND, "the change does nothing"
    assert relative_error(run(parallel), changed) <= BOUND
    ours.params, ours.pe_embedder.theta = kept
    for block in ours.double_blocks:
        block.img_norm1.eps = 1e-6
    assert relative_error(run(parallel), truth) <= BOUND, "it stays"


def test_attributes_that_differ_from_a_model_built_anew_are_told_and_no_others():
    base = stock_model(1).model
    model, attributes = base.diffusion_model, Attributes()
    assert attributes.changed(base) == {}
    watch = Watch(model, attributes=attributes.watched(model))
    model.pe_embedder.theta, model.params.txt_ids_dims = 5.0, [0, 1]
    model.double_blocks[1].img_norm2.eps, model.patch_size, model.note = 1e-3, (3,), "none of the model's"
    assert attributes.changed(base) == {
        "diffusion_model.pe_embedder.theta": 5.0,
        "diffusion_model.params.txt_ids_dims": [0, 1],
        "diffusion_model.double_blocks.1.img_norm2.eps": 1e-3,
        "diffusion_model.patch_size": (3,),
    }
    says = r"^diffusion_model\.\S+ of this MODEL was changed from \S+ to \S+ while it samples"
    with pytest.raises(Refused, match=says):
        watch.check()
    model.params.axes_dim = own_conds
    says = "params.axes_dim .*changed in place to .*own_conds, which cannot be sent"
    with pytest.raises(Refused, match=says):
        attributes.changed(base)


@pytest.mark.parametrize(
    "change", [lambda dm: dm.params.axes_dim.append(1), lambda dm: setattr(dm.pe_embedder, "axes_dim", [3])]
)
def test_rows_of_numbers_that_change_while_the_model_samples_are_named(change):
    base, attributes = stock_model(1).model, Attributes()
    model = base.diffusion_model
    assert attributes.changed(base) == {}
    watch = Watch(model, attributes=attributes.watched(model))
    watch.check()
    change(model)
    with pytest.raises(Refused, match=r"axes_dim of this MODEL was changed from .* while it samples"):
        watch.check()


def test_a_tensor_of_another_dtype_and_another_setting_of_a_function_differ():
    tanh, also, none = (
        functools.partial(torch.nn.functional.gelu, approximate=how) for how in ("tanh", "tanh", "none")
    )
    assert is_unchanged(tanh, also)
    for one, other in (
        (tanh, none),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (lambda: 1, lambda: 2),
    ):
        assert not is_unchanged(one, other)


def test_a_forward_that_is_replaced_after_the_first_steps_is_named(pair, requests):
    _stock, parallel = pair
    left = [2]

    def change(model):
        left[0] -= 1
        if left[0] < 0:
            set_on(model, "forward", nag_forward)

    def put_back(model, _):
        vars(model).pop("forward", None)

    with pytest.raises(Refused, match="nag_forward"):
        run(wrapped(parallel, within_a_wrapper(change, put_back)), steps=4)
    assert requests["Forward"] == 2
