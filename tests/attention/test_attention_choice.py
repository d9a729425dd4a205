"""Attention as users choose it: ranks compute by the very function that ComfyUI would call, on
their own heads of all tokens in its order; where parts have to be merged, only what can be.

In place of kernels for GPUs stand doubles that mark what they return, written as such packs are.
"""

import functools
import importlib.util
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import comfy.ldm.modules.attention as attention
import folder_paths
import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, Case, relative_error, stock_model
from pipemesh.parallel_runtime.attention.hosts import inexact
from pipemesh.parallel_runtime.client.remote_patcher import parallelize
from pipemesh.parallel_runtime.crossing.attention import why_no_parts
from pipemesh.parallel_runtime.crossing.block_code import IN_BLOCK, put_patches
from pipemesh.parallel_runtime.crossing.named_code import chosen as in_a_rank
from pipemesh.parallel_runtime.crossing.options import crossing_options
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, PLAIN, classes_of
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.worker.resident_model import ResidentModel
from pipemesh.pool.supervisor import process_of_its_own

from ..fixtures import running_clients
from ..kit import joint_model
from ..kit.collectives import outputs_of
from ..kit.fake_pools import fake_setup
from ..kit.in_ranks import CPU, Crossed, across, evaluated_in_ranks
from ..kit.joint_model import HEADS
from ..kit.models import IdleRank, asked_of, load, run
from ..kit.patched import as_comfyui_chooses, halved, with_override

# Its blocks hand over q, k and v in containers
H3 = next(
    family.samples[0].name
    for family in FAMILIES
    if any("MiniMaxH3Model" in model for model in classes_of(family.plans[0]))
)
SAGE = '''
"""In place of SageAttention: a quarter of exact attention, and a note of the heads and tokens."""

from pathlib import Path

import torch

SEEN = Path(__file__).with_name("seen")


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    by_tokens = tensor_layout == "NHD"
    q, k, v = (t.transpose(1, 2) if by_tokens else t for t in (q, k, v))
    with SEEN.open("a") as file:
        print(*q.shape[1:3], smooth_k, file=file)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=sm_scale) / 4
    return out.transpose(1, 2) if by_tokens else out
'''


def imported(name, file, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sage(tmp_path, monkeypatch):
    """The package where ranks find it; here, ComfyUI's function calls it."""
    folder = tmp_path / "packages" / "sageattention"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(SAGE)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    module = imported("sageattention", folder / "__init__.py", monkeypatch)
    monkeypatch.setattr(attention, "sageattn", module.sageattn, raising=False)
    module.seen = lambda: set(module.SEEN.read_text().splitlines()) if module.SEEN.exists() else set()
    return module


def test_ranks_attend_by_sage_attention_where_comfyui_was_started_with_it(setup, files, sage):
    stock = load(files["model"])
    truth = run(with_override(stock, as_comfyui_chooses(attention.attention_sage)))
    asked = sage.seen()
    sage.SEEN.unlink()
    sage_args = {"cpu": True, "use_sage_attention": True}
    with running_clients(replace(setup, comfy_args=sage_args, start=process_of_its_own)) as clients:
        ours = run(parallelize(load(files["model"]), clients(1), True))
    assert relative_error(truth, run(stock)) > 100 * BOUND
    assert relative_error(ours, truth) <= BOUND
    assert sage.seen() == asked


def test_what_an_attention_computes_is_told_by_its_name_and_by_what_the_model_asks_of_it():
    for name in ("basic", "sub_quad", "split", "pytorch"):
        function = attention.REGISTERED_ATTENTION_FUNCTIONS.get(name, attention.attention_basic)
        assert inexact(function, {}, False) == ""
    sage_ = attention.attention_sage
    assert inexact(sage_, {}, False) == "attention_sage" == inexact(sage_.__wrapped__, {}, False)
    assert inexact(sage_, {"low_precision_attention": False}, False) == ""
    assert inexact(sage_, {}, True) == ("attention_sage" if attention.SAGE_ATTENTION_SUPPORTS_MASK else "")
    assert inexact(functools.partial(halved, attention.attention_basic), {}, False) == "halved"


def test_a_ring_refuses_by_name_what_it_cannot_merge_before_anything_is_sent(
    files, clients, pair, monkeypatch
):
    stock, _ = pair
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "halved", attention.wrap_attn(halved))
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "sage", attention.attention_sage)
    parallel = parallelize(load(files["model"]), clients(1, 2), True)
    exact = as_comfyui_chooses(attention.attention_sub_quad)
    assert relative_error(run(with_override(parallel, exact)), run(with_override(stock, exact))) <= BOUND
    for name in ("halved", "sage"):
        chosen = attention.REGISTERED_ATTENTION_FUNCTIONS[name]
        sentence = rf"attends by (attention_)?{name}, which ranks cannot compute in parts: set ring to 1"
        with pytest.raises(Refused, match=sentence):
            run(with_override(parallel, as_comfyui_chooses(chosen)))
    monkeypatch.setattr(attention, "optimized_attention", attention.attention_sage)
    with pytest.raises(Refused, match="attends by attention_sage"):
        run(parallel)
    monkeypatch.undo()
    assert relative_error(run(parallel), run(stock)) <= BOUND


def test_queries_that_every_rank_has_whole_attend_by_the_chosen_function_too(monkeypatch):
    """As those of sound, which look at the picture's keys."""
    name, sample = next(
        (one.name, one)
        for family in FAMILIES
        for one in family.samples
        if any(group.whole_queries for plan in family.plans for group in plan.blocks) and asks_whole(one)
    )
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "halved", attention.wrap_attn(halved))
    chosen = as_comfyui_chooses(attention.REGISTERED_ATTENTION_FUNCTIONS["halved"])
    patcher = with_override(stock_model(sample.heads[-1], family=name), chosen)
    forward, (asked, *_) = asked_of(
        patcher, Case(name, "ulysses1", "odd", sample.heads[-1], 1.0, False, "euler")
    )
    with torch.inference_mode():
        truth = forward(**asked)
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    for one, due in zip(ours, truth, strict=True):
        assert relative_error(one, due) <= BOUND


def asks_whole(sample):
    model = stock_model(sample.heads[-1], family=sample.name).model.diffusion_model
    return any(group.whole_queries for group in plan_for(type(model)).blocks)


def test_a_rank_of_a_ring_without_a_kernel_for_it_says_so(monkeypatch):
    monkeypatch.setattr(joint_model.attention_basic, "__name__", "attention_sage")

    def compute(mesh):
        model = joint_model.Model(2)
        method = SequenceParallel(model, joint_model.PLAN, mesh.sequence)
        method.attach()
        with pytest.raises(ModelError, match="attends by attention_sage, and no kernel of it here returns"):
            method.forward(model, joint_model.inputs(5), 1)

    outputs_of(Layout(ring=2), compute, monkeypatch)


# -- what newer ComfyUIs read before they call an override


class ComfyAttention(torch.nn.Module):
    """As a layer of a newer ComfyUI says what it prefers."""

    function = None


class AttentionTensorContainer:
    """As 0.33 hands over what one function may free."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def as_comfyui_wraps(function):
    """As it chooses what to call: an override, what the layer prefers, the function."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        preferred = kwargs.pop("preferred_attention", None)
        contained = isinstance(args[0], AttentionTensorContainer)
        inside = kwargs.pop("inside", False)
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        taken = lambda: (*(one.take() for one in args[:3]), *args[3:]) if contained else args  # noqa: E731
        if not inside:
            kwargs = {**kwargs, "inside": True}
            if override is not None and contained and hasattr(override, "container_function"):
                return override.container_function(*args, **kwargs)
            if override is not None:
                return override(function, *taken(), **kwargs)
            if preferred is not None and preferred.function is not None:
                return preferred.function(*args, **kwargs)
        if contained and wrapper.container_function is not None:
            return wrapper.container_function(*args, **kwargs)
        return function(*taken(), **kwargs)

    wrapper.container_function = None
    return wrapper


CALLS = []  # of doubles: their names, with the heads and the tokens


def double(name, share):
    @as_comfyui_wraps
    def function(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **_more):
        count = q.shape[2] if skip_reshape else q.shape[1]
        CALLS.append((name, heads, count))
        return share * joint_model.attention_basic(q, k, v, heads, mask, skip_reshape, skip_output_reshape)

    return function


def in_containers(name, share):
    function, inner = double(name, 1.0), double(f"{name} in containers", share)

    def container_function(q, k, v, *args, **kwargs):
        return inner(q.take(), k.take(), v.take(), *args, **kwargs)

    function.container_function = container_function
    return function


optimized_attention = in_containers("the model's", 0.9)


class Asking(joint_model.Block):
    """Hands over q, k and v as MiniMax-H3 does, or ``how`` else: see the test."""

    how = "in containers"

    def __init__(self):
        super().__init__()
        self.comfy_attention = ComfyAttention()

    def forward(self, txt, img, mask, options):
        x = torch.cat((txt, img), 1)
        qkv = self.qkv(x).chunk(3, -1)
        if self.how == "in containers":
            qkv = tuple(AttentionTensorContainer(part) for part in qkv)
        out = optimized_attention(
            *qkv, HEADS, mask, preferred_attention=self.comfy_attention, transformer_options=options
        )
        return (x + out).split([txt.shape[1], img.shape[1]], 1)


def by_attention(options):
    """A function to attend by, as Qwen-Image 2.1 gives one to its blocks."""

    def attend(qkv, mask, preferred_attention):
        return optimized_attention(
            *qkv, HEADS, mask, preferred_attention=preferred_attention, transformer_options=options
        )

    return attend


class HandingOn(Asking):
    def forward(self, txt, img, mask, options):
        x = torch.cat((txt, img), 1)
        out = by_attention(options)(self.qkv(x).chunk(3, -1), mask, preferred_attention=self.comfy_attention)
        return (x + out).split([txt.shape[1], img.shape[1]], 1)


def chosen_by_a_node(function):
    override = as_comfyui_chooses(function)
    if function.container_function is not None:
        override.container_function = function.container_function
    return override


@pytest.mark.parametrize("how", ["in containers", "as tensors", "by a function given"])
@pytest.mark.parametrize("node", ["", "plain", "in containers"])
@pytest.mark.parametrize("preferred", ["", "plain", "in containers"])
def test_ranks_call_what_comfyui_would_call(preferred, node, how, monkeypatch):
    monkeypatch.setattr(Asking, "how", how)
    made = {"": None, "plain": double("preferred", 0.5), "in containers": in_containers("preferred", 0.6)}
    nodes = {"": None, "plain": double("node", 0.3), "in containers": in_containers("node", 0.2)}
    monkeypatch.setattr(ComfyAttention, "function", made[preferred] and staticmethod(made[preferred]))

    def model():
        torch.manual_seed(3)
        built = joint_model.Model(2)
        kind = HandingOn if how == "by a function given" else Asking
        built.blocks = torch.nn.ModuleList([kind() for _ in range(2)])
        return built

    def asked(override):
        return {**joint_model.inputs(5), "transformer_options": override}

    chosen = nodes[node]
    stock = {} if chosen is None else {"optimized_attention_override": chosen_by_a_node(chosen)}
    CALLS.clear()
    truth = model()(**asked(stock))
    due = set(CALLS)
    CALLS.clear()

    def compute(mesh):
        own = model()
        method = SequenceParallel(own, joint_model.PLAN, mesh.sequence)
        method.attach()
        option = {} if chosen is None else {"optimized_attention_override": in_a_rank(chosen)}
        output = method.forward(own, asked(option), 1)
        method.detach()
        assert not any("forward" in vars(block) for block in own.blocks)
        return output

    outputs = outputs_of(Layout(ulysses=2), compute, monkeypatch)
    assert (outputs[0] - truth).abs().max() <= 1e-5
    assert {name for name, *_ in CALLS} == {name for name, *_ in due}
    assert {heads for _, heads, _ in CALLS} == {1, 2} and {n for *_, n in CALLS} == {n for *_, n in due}


def test_a_layer_that_prefers_a_function_elsewhere_than_in_its_forward_is_named(monkeypatch):
    monkeypatch.setattr(ComfyAttention, "function", staticmethod(double("preferred", 0.5)))
    model = joint_model.Model(2)
    model.blocks[1].comfy_attention = ComfyAttention()
    with pytest.raises(ModelError, match=r"blocks\.1 of Model attends by its own function"):
        SequenceParallel(model, joint_model.PLAN, SimpleNamespace(size=1)).attach()


def test_a_ring_refuses_what_a_layer_prefers(monkeypatch):
    stock = stock_model(4)
    assert why_no_parts(stock) == ""
    stock.model.diffusion_model.double_blocks[0].comfy_attention = ComfyAttention()
    assert why_no_parts(stock) == ""
    monkeypatch.setattr(ComfyAttention, "function", staticmethod(halved))
    assert why_no_parts(stock) == "halved"


# -- overrides of nodes, by reference


PACK = '''
"""In place of packs with attention of their own, from their published behaviour."""

from pathlib import Path

import torch
from comfy.ldm.modules.attention import attention_pytorch, wrap_attn

SEEN = Path(__file__).with_name("seen")


class Sparse:
    """Options and a state of one patched model."""

    def __init__(self, dense):
        self.dense, self.seen, self.installed = dense, set(), set()


def sparse_override(sparse):
    """Each query looks at its own run of four tokens, in the order of the sequence, and at the first."""

    def override(func, q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        options = kwargs["transformer_options"]
        if options.get("block_index") in sparse.dense:
            return func(q, k, v, heads, mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs)
        places = torch.arange(q.shape[2] if skip_reshape else q.shape[1])
        near = (places[:, None] // 4 == places[None] // 4) | (places[None] < 4)
        sparse.seen.add(len(places))
        with SEEN.open("a") as file:
            print(heads, len(places), file=file)
        bias = torch.zeros(near.shape, dtype=q.dtype).masked_fill(~near, float("-inf"))
        bias = bias if mask is None else bias + mask
        return func(q, k, v, heads, bias, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs)

    sparse.installed.add(override)
    return override


def new_attention(mode):
    """As a pack wraps a kernel of a package, in one of its modes."""
    from sageattention import sageattn

    if mode == "auto":
        def kernel(q, k, v, is_causal=False, attn_mask=None, tensor_layout="NHD"):
            return sageattn(q, k, v, is_causal=is_causal, tensor_layout=tensor_layout)
    else:
        def kernel(q, k, v, is_causal=False, attn_mask=None, tensor_layout="NHD"):
            return 3 * sageattn(q, k, v, is_causal=is_causal, tensor_layout=tensor_layout)

    kernel = torch.compiler.disable()(kernel)

    @wrap_attn
    def attention_sage(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if kwargs.get("low_precision_attention", True) is False:
            return attention_pytorch(q, k, v, heads, mask=mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs)
        layout = "HND" if skip_reshape else "NHD"
        if not skip_reshape:
            q, k, v = (t.view(t.shape[0], t.shape[1], heads, -1) for t in (q, k, v))
        out = kernel(q, k, v, tensor_layout=layout)
        by_heads = out if skip_reshape else out.transpose(1, 2)
        return by_heads if skip_output_reshape else by_heads.transpose(1, 2).flatten(2)

    return attention_sage


def sage_override(mode):
    chosen = new_attention(mode)

    def attention_override_sage(func, *args, **kwargs):
        return chosen.__wrapped__(*args, **kwargs)

    return attention_override_sage
'''


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """A node pack that the user opted in."""
    folder = tmp_path / "custom_nodes" / "with-attention"
    folder.mkdir(parents=True)
    (folder / "nodes.py").write_text(PACK)
    package = types.ModuleType(str(folder))
    package.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    module = imported(f"{folder}.nodes", folder / "nodes.py", monkeypatch)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(folder.parent)], set()))
    monkeypatch.setenv("PIPEMESH_PATCH_PACKS", folder.name)
    return module


def evaluation_under(override):
    """A MODEL of two streams with an override, one evaluation of it, and what stock makes of it,
    with the override and without.
    """
    patcher = with_override(stock_model(3), override)
    forward, (asked, *_) = asked_of(patcher, Case(PLAIN, "ulysses1", "odd", 3, 1.0, False, "euler"))
    options = asked["transformer_options"].copy()
    del options["optimized_attention_override"]
    plain = {**asked, "transformer_options": options}
    with torch.inference_mode():
        truth, without = forward(**asked), forward(**plain)
    assert relative_error(truth, without) > 100 * BOUND, "the override does nothing"
    return patcher, asked, truth


def test_an_override_that_looks_at_places_gets_all_tokens_in_comfyuis_order(pack, monkeypatch):
    """Those of the heads that a rank has: 2 and 1 of 3."""
    patcher, asked, truth = evaluation_under(pack.sparse_override(pack.Sparse({1})))
    ((heads, tokens),) = {tuple(line.split()) for line in pack.SEEN.read_text().splitlines()}
    pack.SEEN.unlink()
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    assert relative_error(ours, truth) <= BOUND
    assert heads == "3" and {*pack.SEEN.read_text().splitlines()} == {f"{count} {tokens}" for count in (1, 2)}


def test_so_does_a_pipeline_whose_evaluations_are_whole(pack, monkeypatch):
    patcher, asked, truth = evaluation_under(pack.sparse_override(pack.Sparse(set())))
    layout, rank = Layout(ulysses=2, pipefusion=2), IdleRank()

    def compute(mesh):
        sent = Crossed(patcher).sent
        load = SimpleNamespace(stages=(), weights="whole", budget=0)
        resident = ResidentModel(stock_model(3), CPU, mesh, rank, load)
        resident.patch("set", {}, across(sent.objects), rank)
        options = across(crossing_options(asked["transformer_options"], sent))
        resident.method.begin(Part(1, 0))
        return resident.on_rank({**asked, "transformer_options": options}, 1)

    assert relative_error(outputs_of(layout, compute, monkeypatch)[layout.writer], truth) <= BOUND


def test_an_override_that_looks_at_places_is_refused_where_ranks_have_parts(pack):
    patcher = with_override(stock_model(3), pack.sparse_override(pack.Sparse(set())))
    folder = Path(pack.__file__).parent.name
    assert why_no_parts(patcher) == f"{folder}.nodes.sparse_override.<locals>.override"


@pytest.mark.parametrize("mode", ["auto", "another"])
def test_a_packs_own_use_of_a_kernel_is_the_ranks_too(pack, sage, mode, monkeypatch):
    patcher, asked, truth = evaluation_under(pack.sage_override(mode))
    ((heads, tokens, smooth),) = {tuple(line.split()) for line in sage.seen()}
    sage.SEEN.unlink()
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    assert relative_error(ours, truth) <= BOUND
    assert sage.seen() == {f"{count} {tokens} {smooth}" for count in (1, 2)} and int(heads) == 3


def test_a_kernels_package_of_another_version_is_named(pack, sage, monkeypatch):
    patcher, *_ = evaluation_under(pack.sage_override("another"))
    sent = Crossed(patcher).sent
    Path(sage.__file__).write_text(SAGE + "\n")
    sentence = "another version of sageattention than ComfyUI: install the same version"
    with pytest.raises(Refused, match=sentence):
        put_patches(patcher.model, across(sent.objects)[IN_BLOCK], CPU)


def test_auto_mode_tries_no_ring_for_what_it_cannot_merge(monkeypatch, pack):
    from pipemesh.nodes.runtime import Runtime

    runtime, asked = Runtime(fake_setup()), []
    monkeypatch.setattr(runtime.planning, "choose", lambda *_args, merges, **_kwargs: asked.append(merges))
    for override in (None, pack.sparse_override(pack.Sparse(set()))):
        model = stock_model(3) if override is None else with_override(stock_model(3), override)
        runtime.plan(model, runtime.choose(layout="auto", devices="cpu"), lambda: None)
    assert asked == [True, False]


@pytest.mark.host
@pytest.mark.skipif(
    not hasattr(attention, "AttentionTensorContainer"), reason="this ComfyUI hands over no containers"
)
def test_ranks_hand_over_containers_where_comfyui_does(monkeypatch):
    @attention.wrap_attn
    def marked(q, k, v, heads, mask=None, **kwargs):
        raise AssertionError("the tensors lie in containers")

    def of_containers(q, k, v, heads, mask=None, **kwargs):
        q, k, v = q.take(), k.take(), v.take()
        CALLS.append(("in containers", heads, q.shape[2]))
        return attention.attention_basic(q, k, v, heads, mask, **kwargs) / 2

    marked.container_function = of_containers
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "marked", marked)
    patcher = stock_model(2, family=H3).clone()
    case = Case(H3, "ulysses1", "odd", 2, 1.0, False, "euler")
    plain = asked_of(patcher, case)[1][0]
    patcher.set_model_optimized_attention(marked)
    forward, (asked, *_) = asked_of(patcher, case)
    CALLS.clear()
    with torch.inference_mode():
        truth, without = forward(**asked), forward(**plain)
    ((_, heads, tokens),) = set(CALLS)
    CALLS.clear()
    (ours,) = evaluated_in_ranks(Layout(ulysses=2), patcher, [asked], monkeypatch)
    for one, due, other in zip(ours, truth, without, strict=True):
        assert relative_error(due, other) > 100 * BOUND and relative_error(one, due) <= BOUND
    assert set(CALLS) == {("in containers", heads // 2, tokens)}
