"""Blocks that ranks compile: one graph each, and the same result."""

import gc
import inspect
import weakref

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from pipemesh.lab.bench.forwards import standin
from pipemesh.lab.commands.parity import BOUND, PLAIN, Case, relative_error, sample, stock_model
from pipemesh.nodes.status.sums import run_figures
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.options import hand_over_compilation
from pipemesh.parallel_runtime.errors import Refused
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, SAMPLES
from pipemesh.parallel_runtime.families.plan import COMPILE, LEFT_OUT
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods import compiled_blocks
from pipemesh.parallel_runtime.methods.blocks import blocks_of
from pipemesh.parallel_runtime.methods.compiled_blocks import is_compiled, opaque_attention
from pipemesh.parallel_runtime.methods.override import ASKED, AttentionChoice, AttentionOverride
from pipemesh.parallel_runtime.methods.usp import SequenceParallel
from pipemesh.parallel_runtime.worker import compiling
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import get_first_incompatible_cudagraph_node

from ..fixtures import ALL
from ..kit.joint_model import attention_basic
from ..kit.models import load, run
from ..kit.patched import ALL_WARM, execute

HOOKED = ("local", "whole_queries", "without_options")  # what has hooks inside of blocks
WHOLE = {"paths": [""], "kwargs": {"backend": "eager", "fullgraph": True}}


def samples():
    """The plain sample, and the first one of each word that has hooks inside of blocks."""
    if ALL:
        return list(SAMPLES)
    firsts = [
        next(
            family.samples[0].name
            for family in FAMILIES
            if any(getattr(group, word) for plan in family.plans for group in plan.blocks)
        )
        for word in HOOKED
    ]
    return list(dict.fromkeys([PLAIN, *firsts]))


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Rank:
    """What a rank notes, in order."""

    def __init__(self):
        self.noted = []

    def tick(self):
        self.noted.append("tick")

    def note(self, phase):
        self.noted.append(phase)


class OneRank:
    """A stock MODEL of a sample whose evaluations run as a rank alone runs them. ``options``: added
    to those of every evaluation.
    """

    def __init__(self, name, heads):
        self.patcher = stock_model(heads, family=name)
        self.module = self.patcher.model.diffusion_model
        self.plan = plan_for(type(self.module))
        self.method = SequenceParallel(self.module, self.plan, standin(Layout(), 0))
        self.method.attach()
        self.options = {}
        own = getattr(self.module, forward_name(self.module))
        signature = inspect.signature(own)

        def forward(*args, **kwargs):
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            arguments |= arguments.pop("kwargs", {})
            arguments["transformer_options"] = {**arguments["transformer_options"], **self.options}
            return self.method.forward(own, arguments, 1)

        setattr(self.module, forward_name(self.module), forward)


def case_of(name):
    one = SAMPLES[name]
    return Case(name, "ulysses1", "odd", one.heads[-1], 1.0, one.masks is not None, "euler")


@pytest.mark.parametrize("name", samples())
def test_every_block_is_one_graph_around_an_opaque_attention(name):
    """``fullgraph`` raises where a block would be cut. A graph stands for all blocks of a kind,
    or for all but the first, whose input may lie otherwise in memory.
    Local attention without options is the host's own, whose kernel for CPUs asks for free memory.
    """
    case = case_of(name)
    rank = OneRank(name, case.heads)
    truth = sample(rank.patcher, case)
    cut = any(
        group.without_options and hasattr(container[index], "cross_attn")
        for container, index, group in blocks_of(rank.module, rank.plan)
    )
    rank.options[COMPILE] = {**WHOLE, "kwargs": {"backend": "eager", "fullgraph": not cut}}
    assert relative_error(sample(rank.patcher, case), truth) <= BOUND
    graphs = counters["stats"]["unique_graphs"]
    kinds = {
        (type(container[index]), *container[index].state_dict())
        for container, index, _ in blocks_of(rank.module, rank.plan)
    }
    assert 1 <= graphs <= 2 * len(kinds) or cut
    again = sample(rank.patcher, case)
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again for the same shape"
    assert relative_error(again, truth) <= BOUND


def test_only_the_named_modules_are_compiled_and_detaching_leaves_none():
    case = case_of(PLAIN)
    rank = OneRank(PLAIN, case.heads)
    first, *others = [container[index] for container, index, _ in blocks_of(rank.module, rank.plan)]
    rank.options[COMPILE] = {**WHOLE, "paths": [f"{rank.plan.blocks[0].path}.0"]}
    sample(rank.patcher, case)
    assert "forward" in vars(first)
    assert not any("forward" in vars(block) for block in others)
    rank.options[COMPILE] = {**WHOLE, "paths": [f"{rank.plan.blocks[0].path}.1"]}
    sample(rank.patcher, case)
    assert "forward" in vars(others[0]) and "forward" not in vars(first), "others are named now"
    rank.method.detach()
    assert "forward" not in vars(others[0])


def test_a_name_is_of_a_module_and_of_what_is_in_it():
    found = [is_compiled(path, ["blocks.1"]) for path in ("blocks.1", "blocks.1.attn", "blocks.10", "blocks")]
    assert found == [True, True, False, False]


def test_a_block_that_is_left_out_is_compiled_again_where_it_is_not():
    case = case_of(PLAIN)
    rank = OneRank(PLAIN, case.heads)
    truth = sample(rank.patcher, case)
    rank.options = {COMPILE: WHOLE, LEFT_OUT: [("double_block", 0)]}
    assert relative_error(sample(rank.patcher, case), truth) > 100 * BOUND
    rank.options = {COMPILE: WHOLE}
    assert relative_error(sample(rank.patcher, case), truth) <= BOUND
    first, *_ = (container[index] for container, index, _ in blocks_of(rank.module, rank.plan))
    assert "forward" in vars(first)


def test_compiling_is_a_phase_of_its_own_with_progress(monkeypatch):
    monkeypatch.setattr(compiling, "TICK_S", 0.0)
    rank = Rank()
    with compiling.compilation_noted(rank):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.ones(2) + 1
    phases = [one for one in rank.noted if one != "tick"]
    assert phases[:2] == ["compiling", "computing"]
    assert "tick" in rank.noted
    rank.noted.clear()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert not rank.noted, "noted after its evaluation"


def test_a_compiler_that_fails_is_named_with_the_next_move():
    def backend(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    sentence = r"torch.compile failed in a rank .*no C\+\+ compiler here.*remove the node that compiles"
    with pytest.raises(Refused, match=sentence), compiling.compilation_noted(Rank()):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_a_graph_of_one_model_serves_another_with_that_ones_attention():
    case = case_of(PLAIN)
    for _ in range(2):
        rank = OneRank(PLAIN, case.heads)
        truth = sample(rank.patcher, case)
        rank.options[COMPILE] = WHOLE
        assert relative_error(sample(rank.patcher, case), truth) <= BOUND
        graphs = counters["stats"]["unique_graphs"]
        rank.method.end_run()
        del rank
        attention = opaque_attention()
        assert attention.override is None, "the model is kept"
    assert graphs == counters["stats"]["unique_graphs"] <= 2


def test_a_function_that_a_model_brought_goes_with_the_model():
    """A layer may prefer a function of its own, which holds the model: each load has another."""

    def of_a_model():
        weight = torch.full((1, 2, 4), 2.0)

        def function(q, k, v, heads, mask=None, **_more):
            return q * weight

        override = AttentionOverride()
        override.attend = lambda attention, q, k, v, heads, mask, *args, **kwargs: kwargs[ASKED].preferred(
            q, k, v, heads, mask
        )
        override.asked = AttentionChoice(preferred=function)
        opaque.override = override
        kwargs = {ASKED: override.asked}
        compiled_blocks = torch.compile(
            lambda q: opaque(attention_basic, q, q, q, 1, None, **kwargs), backend="eager", fullgraph=True
        )
        assert torch.equal(compiled_blocks(torch.ones(1, 2, 4)), weight)
        assert torch.equal(compiled_blocks(torch.ones(1, 2, 4)), weight)
        opaque.override = None
        return weakref.ref(function)

    opaque, counts = opaque_attention(), []
    for _ in range(3):
        function = of_a_model()
        torch._dynamo.reset()
        gc.collect()
        assert function() is None
        counts.append(len(opaque._notes))
    assert counts[0] == counts[-1]


def test_no_cuda_graph_records_an_attention():
    """Replayed, it would send what it sent then, and see no cancel: torch is told to leave it."""
    case, left_out = case_of(PLAIN), []

    def compiler(graph, _inputs):
        left_out.append(get_first_incompatible_cudagraph_node(graph))
        return graph.forward

    rank = OneRank(PLAIN, case.heads)
    rank.options[COMPILE] = {"paths": [""], "kwargs": {"backend": aot_autograd(fw_compiler=compiler)}}
    sample(rank.patcher, case)
    assert left_out and all("attend" in str(node) for node in left_out)


@pytest.mark.parametrize(
    ("kwargs", "refused"),
    [
        ({"backend": "cudagraphs"}, True),
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "eager", "mode": None, "options": {"max_autotune": True}}, False),
    ],
)
def test_a_torch_that_cannot_be_told_refuses_cuda_graphs(monkeypatch, kwargs, refused):
    monkeypatch.setattr(compiled_blocks, "UNSAFE", ())
    case = case_of(PLAIN)
    rank = OneRank(PLAIN, case.heads)
    rank.options[COMPILE] = {"paths": [""], "kwargs": kwargs}
    if refused:
        with pytest.raises(Refused, match=r"into CUDA graphs: have the node compile with inductor"):
            sample(rank.patcher, case)
    else:
        assert not compiled_blocks.records_graphs(**kwargs)


def eager(model):
    made = model.clone()
    set_torch_compile_wrapper(made, backend="eager", fullgraph=True)
    return made


@pytest.mark.parametrize("layout", [(2,), (1, 2), (1, 1, 2)] if ALL else [(1, 2)])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_torch_compile_compiles_in_the_ranks(files, clients, caplog, layout, compiled_first):
    patching = Patching(2, ALL_WARM) if len(layout) == 3 else None
    pool = clients(*layout)
    truth = run(load(files["model"]))
    model = load(files["model"])
    parallel = (
        parallelize(eager(model), pool, 0.0, patching)
        if compiled_first
        else eager(parallelize(model, pool, 0.0, patching))
    )
    assert relative_error(run(parallel), truth) <= BOUND
    assert "torch.compile" not in caplog.text
    with pytest.raises(Refused, match=r"torch.compile failed in a rank .*no_such_backend.*remove the node"):
        run(unknown(parallel))
    assert relative_error(run(parallel), truth) <= BOUND


def test_blocks_whose_weights_are_gathered_are_not_compiled(files, clients):
    """Before each layer, which ends a graph: where one graph was asked for, that was an error."""
    truth = run(load(files["model"]))
    pool = clients(2)
    parallel = parallelize(eager(load(files["model"])), pool, 0.0, weights="sharded")
    assert relative_error(run(parallel), truth) <= BOUND
    assert run_figures(pool.runs.last, "m", "gloo").to_compile == "m"
    run(parallelize(load(files["model"]), pool, 0.0, weights="sharded"))
    assert run_figures(pool.runs.last, "m", "gloo").to_compile == ""


COMPILED_BY_MODEL = weakref.WeakKeyDictionary()


def kj_wrapper(executor, *args, **kwargs):
    compiled_blocks = COMPILED_BY_MODEL.get(executor.class_obj)
    return executor(*args, **kwargs) if compiled_blocks else None


def kj_guards(entries):
    return [True for _ in entries]


def as_kjnodes(model, keys):
    """As its TorchCompileModelAdvanced compiles: the modules are in a mapping of its module."""
    made = model.clone()
    settings = {
        "backend": "eager",
        "options": {"guard_filter_fn": kj_guards},
        "mode": None,
        "fullgraph": True,
        "dynamic": False,
    }
    if keys:
        COMPILED_BY_MODEL[made.model] = {
            key: torch.compile(made.get_model_object(key), **settings) for key in keys
        }
    made.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, kj_wrapper)
    made.model_options[TORCH_COMPILE_KWARGS] = settings
    return made


def test_ranks_compile_what_kjnodes_node_names_and_no_other_models(caplog):
    model, other = stock_model(1), stock_model(1)
    keys = ["diffusion_model.double_blocks.0", "diffusion_model.single_blocks.1"]
    made = as_kjnodes(model, keys)
    options = made.model_options | {"transformer_options": {"wrappers": made.wrappers}}
    assert hand_over_compilation(options, made.model)
    assert options["transformer_options"][COMPILE] == {
        "paths": ["double_blocks.0", "single_blocks.1"],
        "kwargs": {"backend": "eager", "options": {}, "mode": None, "fullgraph": True, "dynamic": False},
    }
    assert COMPILE_KEY not in options["transformer_options"]["wrappers"][WrappersMP.APPLY_MODEL]
    assert "torch.compile" not in caplog.text
    made = as_kjnodes(other, [])
    options = made.model_options | {"transformer_options": {"wrappers": made.wrappers}}
    assert hand_over_compilation(options, made.model)
    assert COMPILE not in options["transformer_options"]
    assert "torch.compile is left out: which modules of the transformer" in caplog.text
    assert "test_compiled.kj_wrapper compiles is not known" in caplog.text


def unknown(model):
    made = eager(model)
    made.model_options[TORCH_COMPILE_KWARGS]["backend"] = "no_such_backend"
    return made


@pytest.mark.skipif(not ALL, reason="a minute of compiling")
def test_inductor_in_the_ranks_is_as_exact_as_eager(files, client):
    truth = run(load(files["model"]))
    parallel = parallelize(
        execute("nodes_torch_compile", "TorchCompileModel", load(files["model"]), "inductor"), client, 0.0
    )
    assert relative_error(run(parallel), truth) <= BOUND
