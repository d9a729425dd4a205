"""Patches inside blocks that ranks know by name: as in stock, with an effect."""

import comfy.ldm.modules.attention as attention
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.named_code import OVERRIDE, SETTINGS, attention_backend, options_made
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.parallel_runtime.families.plan import LEFT_OUT
from pipemesh.parallel_runtime.methods.node_patches import kinds_of
from pipemesh.parallel_runtime.wire.tree import decode_tree

from ..kit.models import asked_of, load, run
from ..kit.patched import ALL_WARM, Patched, execute


def skip(args, extra_args):
    return args


@pytest.mark.cover(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.samples[0].name)
def test_blocks_are_left_out_as_in_stock(family):
    """In one process: each method has the same hooks."""
    name, heads, plan = family.samples[0].name, family.samples[0].heads[0], family.plans[0]
    stock = stock_model(heads, family=name)
    model = stock.model.diffusion_model
    forward, (asked, *_) = asked_of(stock, Case(name, "ulysses1", "odd", heads, 1.0, False, "euler"))
    among = any(group.interleaved for group in plan.blocks)  # then the first one is refused
    blocks = {
        (kind, index): skip
        for kind in ("double_block", "single_block")
        for index in (1 if among else 0, 2, 99)
    }
    options = {**asked["transformer_options"], "patches_replace": {"dit": blocks}}
    method = PatchForward(model, plan)
    if plan.prefix is not None:
        with pytest.raises(Refused, match=r"^No block of .* can be left out in the pool"):
            method.forward(
                forward, {**asked, "transformer_options": {LEFT_OUT: [("double_block", 1)]}}, "cond", None
            )
        return
    with torch.inference_mode():
        plain, truth = forward(**asked), forward(**{**asked, "transformer_options": options})
        method.attach()
        ours, again = (
            method.forward(
                forward,
                {**asked, "transformer_options": options_made(crossing_options(crossing))},
                "cond",
                None,
            )
            for crossing in (options, asked["transformer_options"])
        )
    assert (relative_error(in_one(truth), in_one(plain)) > 100 * BOUND) == bool(kinds_of(model, plan))
    assert relative_error(in_one(ours), in_one(truth)) <= BOUND
    assert relative_error(in_one(again), in_one(plain)) <= BOUND, "they were left out for good"
    if among:
        with pytest.raises(Refused, match=r"The first block of .* cannot be left out"):
            method.forward(
                forward, {**asked, "transformer_options": {LEFT_OUT: [("double_block", 0)]}}, "cond", None
            )


def in_one(output):
    return output if isinstance(output, torch.Tensor) else torch.cat([one.flatten() for one in output])


def guided(model, simple):
    if simple:
        return execute(
            "nodes_slg", "SkipLayerGuidanceDiTSimple", model, 0.0, 0.9, double_layers="0", single_layers="1"
        )
    return execute(
        "nodes_slg",
        "SkipLayerGuidanceDiT",
        model,
        2.0,
        0.0,
        0.9,
        double_layers="1",
        single_layers="0",
        rescaling_scale=0.5,
    )


def test_an_evaluation_without_some_blocks_is_of_another_branch_than_the_whole_one():
    """Else ranks keep keys and values of both in one place."""
    without = {"patches_replace": {"dit": {("double_block", 1): skip}}}
    assert Branch.of(without) != Branch.of({})


@pytest.mark.cover(4)
@pytest.mark.parametrize(
    "degrees, simple", [((2, 1, 1), False), ((1, 2, 1), True), ((1, 1, 2), False), ((1, 1, 2), True)]
)
def test_skip_layer_guidance_is_as_in_stock(files, clients, degrees, simple):
    stock = load(files["model"])
    modes = []
    patching = Patching(3, ALL_WARM) if degrees[2] > 1 else None
    parallel = parallelize(load(files["model"]), clients(*degrees), 0.0, patching, modes.append)
    truth = run(guided(stock, simple), cfg=3.0)
    assert relative_error(truth, run(stock, cfg=3.0)) > 0.05, "the node does nothing"
    assert relative_error(run(guided(parallel, simple), cfg=3.0), truth) <= BOUND
    if patching is not None:
        assert (
            modes == [mode for mode in modes if mode.startswith("single-timeline, because of sampler_")] != []
        )
        patched = parallelize(load(files["model"]), clients(*degrees), 0.0, Patching(3, 1))
        first = run(guided(stock, simple), cfg=3.0, steps=1)
        assert relative_error(run(guided(patched, simple), cfg=3.0, steps=1), first) <= BOUND, (
            "what is kept of one branch was used for another"
        )


def halved(q, k, v, heads, mask=None, **kwargs):
    return attention.attention_basic(q, k, v, heads, mask, **kwargs) / 2


def as_comfyui_chooses(optimized_attention):
    """As ModelPatcher.set_model_optimized_attention of later ComfyUIs."""

    def optimized_attention_override(_, *args, **kwargs):
        return optimized_attention(*args, **kwargs)

    return optimized_attention_override


def as_kjnodes_chooses(new_attention):
    def attention_override_sage(func, *args, **kwargs):
        return new_attention.__wrapped__(*args, **kwargs)

    return attention_override_sage


def with_override(model, override):
    clone = model.clone()
    clone.model_options["transformer_options"][OVERRIDE] = override
    return clone


@pytest.mark.cover(4)
@pytest.mark.parametrize("form", [as_comfyui_chooses, as_kjnodes_chooses])
def test_ranks_attend_by_the_registered_function_that_a_node_chose(monkeypatch, form):
    registered = attention.wrap_attn(halved)
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "halved", registered)
    case = Case(FAMILIES[0].samples[0].name, "ulysses2", "odd", 4, 1.0, False, "euler")
    stock = stock_model(4)
    truth = sample(with_override(stock, form(registered)), case, steps=2)
    assert relative_error(truth, sample(stock, case, steps=2)) > 0.01
    patched = Patched(stock_model(4)).model
    assert relative_error(sample(with_override(patched, form(registered)), case, steps=2), truth) <= BOUND
    assert relative_error(sample(patched, case, steps=2), sample(stock, case, steps=2)) <= BOUND


def test_an_attention_backend_runs_in_the_pool_or_is_refused_by_the_name_that_ranks_lack(pair, monkeypatch):
    stock, parallel = pair
    chosen = as_comfyui_chooses(attention.attention_sub_quad)
    assert relative_error(run(with_override(parallel, chosen)), run(with_override(stock, chosen))) <= BOUND
    registered = attention.wrap_attn(halved)
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "halved", registered)
    with pytest.raises(
        (Refused, ModelError), match=r"no attention function halved \(.*sub_quad.*\): install"
    ):
        run(with_override(parallel, as_comfyui_chooses(registered)))
    assert relative_error(run(parallel), run(stock)) <= BOUND


def sageattn(q, k, v, **kwargs):
    return v


def another_kernel(q, k, v, **kwargs):
    return v


def kjnodes_attention(kernel):
    """As its get_sage_func makes it."""

    def sage_func(q, k, v, is_causal=False, attn_mask=None, tensor_layout="NHD"):
        return kernel(q, k, v, is_causal=is_causal, attn_mask=attn_mask, tensor_layout=tensor_layout)

    sage_func = torch.compiler.disable()(sage_func)

    @attention.wrap_attn
    def attention_sage(q, k, v, heads, mask=None, **kwargs):
        return sage_func(q, k, v)

    return attention_sage


def test_kjnodes_sage_attention_is_comfyuis_where_it_chooses_the_kernel_itself(pair, monkeypatch):
    _stock, parallel = pair
    monkeypatch.setattr(attention, "sageattn", sageattn, raising=False)
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "sage", attention.attention_sage)
    assert attention_backend(as_kjnodes_chooses(kjnodes_attention(sageattn))) == "sage"
    with pytest.raises(Refused, match=r"attention_override_sage.*another_kernel.*PIPEMESH_PATCH_PACKS"):
        run(with_override(parallel, as_kjnodes_chooses(kjnodes_attention(another_kernel))))


def test_code_that_does_more_than_its_name_says_is_not_taken_for_it(pair):
    _stock, parallel = pair

    def doubled(_, *args, **kwargs):
        return 2 * chosen(*args, **kwargs)

    chosen = attention.attention_sub_quad
    with pytest.raises(Refused, match="doubled"):
        run(with_override(parallel, doubled))
    clone = parallel.clone()
    clone.set_model_patch_replace(lambda args, extra: extra, "dit", "double_block", 0)
    with pytest.raises(Refused, match="patches_replace/dit"):
        run(clone)


@pytest.fixture
def matmul():
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, False
    yield matmul
    matmul.allow_fp16_accumulation = before


def test_settings_of_torch_are_the_ranks_for_the_evaluation(pair, client, matmul, monkeypatch):
    """As KJNodes' ModelPatchTorchSettings makes them, before a run and after it."""
    _stock, parallel = pair
    name = "backends.cuda.matmul.allow_fp16_accumulation"
    sent = []
    pool = client.sessions.open(lambda: False).pool
    real = type(pool).submit

    def submit(self, request, *args):
        if type(request).__name__ == "Forward":
            sent.append(
                decode_tree(request.arguments, lambda ref: None)["transformer_options"][SETTINGS][name]
            )
        return real(self, request, *args)

    monkeypatch.setattr(type(pool), "submit", submit)
    clone = parallel.clone()
    clone.add_callback(CallbacksMP.ON_PRE_RUN, lambda _: setattr(matmul, "allow_fp16_accumulation", True))
    clone.add_callback(CallbacksMP.ON_CLEANUP, lambda _: setattr(matmul, "allow_fp16_accumulation", False))
    run(clone, steps=1)
    run(parallel, steps=1)
    assert sent == [True, False]
    assert options_made({SETTINGS: {name: True}, "other": 1}) == {"other": 1}
    assert matmul.allow_fp16_accumulation is True
