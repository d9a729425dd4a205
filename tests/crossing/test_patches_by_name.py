"""Patches inside blocks that ranks know by name: as in stock, with an effect."""

import comfy.ldm.modules.attention as attention
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, sample, stock_model
from pipemesh.lab.reference import PatchForward
from pipemesh.parallel_runtime.client.branch import Branch
from pipemesh.parallel_runtime.crossing.named_code import SETTINGS, attention_backend, options_made
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families.catalogue import FAMILIES
from pipemesh.parallel_runtime.families.plan import LEFT_OUT
from pipemesh.parallel_runtime.methods.node_patches import kinds_of
from pipemesh.parallel_runtime.wire.tree import decode_tree

from ..kit.bounds import assert_honoured
from ..kit.models import asked_first, in_one, run
from ..kit.patched import Patched, as_comfyui_chooses, halved, with_override


def skip(args, extra_args):
    return args


@pytest.mark.cover(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.samples[0].name)
def test_blocks_are_left_out_as_in_stock(family):
    """In one process: each method has the same hooks."""
    one, plan = family.samples[0], family.plans[0]
    stock = stock_model(one.heads[0], family=one.name)
    model = stock.model.diffusion_model
    forward, asked = asked_first(stock, one, one.heads[0])
    method = PatchForward(model, plan)

    def ours(options):
        return in_one(method.forward(forward, {**asked, "transformer_options": options}, "cond", None))

    if plan.prefix is not None:
        with pytest.raises(Refused, match=r"^No block of .* can be left out in the pool"):
            ours({LEFT_OUT: [("double_block", 1)]})
        return
    among = any(group.interleaved for group in plan.blocks)  # then the first one is refused
    kinds, numbers = ("double_block", "single_block"), (1 if among else 0, 2, 99)
    blocks = {(kind, number): skip for kind in kinds for number in numbers}
    whole = asked["transformer_options"]
    options = {**whole, "patches_replace": {"dit": blocks}}
    with torch.inference_mode():
        plain = in_one(forward(**asked))
        truth = in_one(forward(**{**asked, "transformer_options": options}))
        method.attach()
        assert (relative_error(truth, plain) > 100 * BOUND) == bool(kinds_of(model, plan))
        assert relative_error(ours(options_made(crossing_options(options))), truth) <= BOUND
        assert relative_error(ours(options_made(crossing_options(whole))), plain) <= BOUND, (
            "left out for good"
        )
    if among:
        with pytest.raises(Refused, match=r"The first block of .* cannot be left out"):
            ours({LEFT_OUT: [("double_block", 0)]})


def test_an_evaluation_without_some_blocks_is_of_another_branch_than_the_whole_one():
    """Else ranks keep keys and values of both in one place."""
    without = {"patches_replace": {"dit": {("double_block", 1): skip}}}
    assert Branch.of(without) != Branch.of({})


def as_kjnodes_chooses(new_attention):
    def attention_override_sage(func, *args, **kwargs):
        return new_attention.__wrapped__(*args, **kwargs)

    return attention_override_sage


@pytest.fixture
def registered(monkeypatch):
    made = attention.wrap_attn(halved)
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "halved", made)
    return made


@pytest.mark.parametrize("form", [as_comfyui_chooses, as_kjnodes_chooses])
def test_ranks_attend_by_the_registered_function_that_a_node_chose(registered, form):
    case = Case(FAMILIES[0].samples[0].name, "ulysses2", "odd", 4, 1.0, False, "euler")
    assert_honoured(
        lambda model: with_override(model, form(registered)),
        lambda model: sample(model, case, steps=2),
        Patched(stock_model(4)).model,
        stock_model(4),
    )


def test_an_attention_function_that_ranks_lack_is_refused_by_name(pair, registered):
    stock, parallel = pair
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


@pytest.fixture
def matmul():
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, False
    yield matmul
    matmul.allow_fp16_accumulation = before


def test_settings_of_torch_are_the_ranks_for_the_evaluation(pair, client, matmul, monkeypatch):
    """As KJNodes' ModelPatchTorchSettings makes them, before a run and after it."""
    _stock, parallel = pair
    name, sent = "backends.cuda.matmul.allow_fp16_accumulation", []
    pool = type(client.sessions.open(lambda: False).pool)
    real = pool.submit

    def submit(self, request, *args):
        if type(request).__name__ == "Forward":
            options = decode_tree(request.arguments, lambda ref: None)["transformer_options"]
            sent.append(options[SETTINGS][name])
        return real(self, request, *args)

    monkeypatch.setattr(pool, "submit", submit)
    clone = parallel.clone()
    for when, on in ((CallbacksMP.ON_PRE_RUN, True), (CallbacksMP.ON_CLEANUP, False)):
        clone.add_callback(when, lambda _, on=on: setattr(matmul, "allow_fp16_accumulation", on))
    run(clone, steps=1)
    run(parallel, steps=1)
    assert sent == [True, False]
    assert options_made({SETTINGS: {name: True}, "other": 1}) == {"other": 1}
    assert matmul.allow_fp16_accumulation is True
