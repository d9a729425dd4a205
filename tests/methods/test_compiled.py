"""Blocks that ranks compile: one graph each, and the same result. And ComfyUI's model compiler,
which newer ones have, told by doubles: it records nothing of a run that is computed elsewhere, and
blocks that it replays are no wrong image.
"""

import gc
import inspect
import threading
import weakref
from random import Random

import comfy.cli_args
import comfy.model_prefetch
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from pipemesh.lab.bench.forwards import standin
from pipemesh.lab.commands.parity import BOUND, PLAIN, Case, relative_error, sample, stock_model
from pipemesh.nodes.status.sums import run_figures
from pipemesh.parallel_runtime.client.remote_forward import NO_COMPILER
from pipemesh.parallel_runtime.client.remote_patcher import Patching, parallelize
from pipemesh.parallel_runtime.crossing.options import hand_over_compilation
from pipemesh.parallel_runtime.errors import ModelError, Refused
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
from ..kit import joint_model
from ..kit.collectives import World
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


class Noting:
    """A rank that notes what it is told, in order."""

    def __init__(self):
        self.noted = []

    def tick(self):
        self.noted.append("tick")

    def note(self, phase):
        self.noted.append(phase)


class LoneRank:
    """A stock MODEL of a sample whose evaluations run as a rank alone runs them."""

    def __init__(self, name=PLAIN):
        one = SAMPLES[name]
        self.case = Case(name, "ulysses1", "odd", one.heads[-1], 1.0, one.masks is not None, "euler")
        self.patcher = stock_model(self.case.heads, family=name)
        self.module = self.patcher.model.diffusion_model
        plan = plan_for(type(self.module))
        self.method = SequenceParallel(self.module, plan, standin(Layout(), 0))
        self.method.attach()
        self.path = plan.blocks[0].path
        self.groups = [(container[index], group) for container, index, group in blocks_of(self.module, plan)]
        self.options = {}
        own = getattr(self.module, forward_name(self.module))
        signature = inspect.signature(own)

        def forward(*args, **kwargs):
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            arguments |= arguments.pop("kwargs", {})
            arguments["transformer_options"] = {**arguments["transformer_options"], **self.options}
            return self.method.forward(own, arguments, 1)

        setattr(self.module, forward_name(self.module), forward)

    def sampled(self, compiled=None, **options):
        """What comes of a run with these options in every evaluation."""
        self.options = {**options, **({} if compiled is None else {COMPILE: compiled})}
        return sample(self.patcher, self.case, steps=1)

    def compiled(self):
        """The places of the blocks that are compiled."""
        return [place for place, (block, _) in enumerate(self.groups) if "forward" in vars(block)]


@pytest.mark.parametrize("name", samples())
def test_every_block_is_one_graph_around_an_opaque_attention(name):
    """``fullgraph`` raises where a block would be cut. A graph stands for all blocks of a kind,
    or for all but the first, whose input may lie otherwise in memory.
    Local attention without options is the host's own, whose kernel for CPUs asks for free memory.
    """
    rank = LoneRank(name)
    truth = rank.sampled()
    cut = any(group.without_options and hasattr(block, "cross_attn") for block, group in rank.groups)
    whole = {**WHOLE, "kwargs": {"backend": "eager", "fullgraph": not cut}}
    assert relative_error(rank.sampled(whole), truth) <= BOUND
    graphs = counters["stats"]["unique_graphs"]
    kinds = {(type(block), *block.state_dict()) for block, _ in rank.groups}
    assert 1 <= graphs <= 2 * len(kinds) or cut
    assert relative_error(rank.sampled(whole), truth) <= BOUND
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again for the same shape"


def test_only_the_named_modules_are_compiled_and_detaching_leaves_none():
    rank = LoneRank()
    for place in (0, 1):  # others are named now
        rank.sampled({**WHOLE, "paths": [f"{rank.path}.{place}"]})
        assert rank.compiled() == [place]
    rank.method.detach()
    assert not rank.compiled()


def test_a_name_is_of_a_module_and_of_what_is_in_it():
    found = [is_compiled(path, ["blocks.1"]) for path in ("blocks.1", "blocks.1.attn", "blocks.10", "blocks")]
    assert found == [True, True, False, False]


def test_a_block_that_is_left_out_is_compiled_again_where_it_is_not():
    rank = LoneRank()
    truth = rank.sampled()
    left_out = {LEFT_OUT: [("double_block", 0)]}
    assert relative_error(rank.sampled(WHOLE, **left_out), truth) > 100 * BOUND
    assert relative_error(rank.sampled(WHOLE), truth) <= BOUND
    assert 0 in rank.compiled()


def test_compiling_is_a_phase_of_its_own_with_progress(monkeypatch):
    monkeypatch.setattr(compiling, "TICK_S", 0.0)
    rank = Noting()
    with compiling.compilation_noted(rank):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.ones(2) + 1
    phases = [one for one in rank.noted if one != "tick"]
    assert phases[:2] == ["compiling", "computing"]
    assert "tick" in rank.noted
    rank.noted.clear()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert not rank.noted, "noted after its evaluation"


def test_a_graph_of_one_model_serves_another_with_that_ones_attention():
    graphs = []
    for _ in range(2):
        rank = LoneRank()
        truth = rank.sampled()
        assert relative_error(rank.sampled(WHOLE), truth) <= BOUND
        graphs.append(counters["stats"]["unique_graphs"])
        rank.method.end_run()
        del rank
        assert opaque_attention().override is None, "the model is kept"
    assert graphs[0] == graphs[1] <= 2


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
    left_out = []

    def compiler(graph, _inputs):
        left_out.append(get_first_incompatible_cudagraph_node(graph))
        return graph.forward

    rank = LoneRank()
    backend = aot_autograd(fw_compiler=compiler)
    rank.sampled({"paths": [f"{rank.path}.0"], "kwargs": {"backend": backend}})
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
    if refused:
        with pytest.raises(Refused, match=r"into CUDA graphs: have the node compile with inductor"):
            LoneRank().sampled({"paths": [""], "kwargs": kwargs})
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
    settings = {"backend": "eager", "options": {"guard_filter_fn": kj_guards}, "mode": None}
    settings |= {"fullgraph": True, "dynamic": False}
    if keys:
        modules = {key: torch.compile(made.get_model_object(key), **settings) for key in keys}
        COMPILED_BY_MODEL[made.model] = modules
    made.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, kj_wrapper)
    made.model_options[TORCH_COMPILE_KWARGS] = settings
    return made


def test_ranks_compile_what_kjnodes_node_names_and_no_other_models(caplog):
    def handed_over(*paths):
        made = as_kjnodes(stock_model(1), [f"diffusion_model.{path}" for path in paths])
        options = made.model_options | {"transformer_options": {"wrappers": made.wrappers}}
        assert hand_over_compilation(options, made.model)
        return options["transformer_options"]

    options = handed_over("double_blocks.0", "single_blocks.1")
    assert options[COMPILE] == {
        "paths": ["double_blocks.0", "single_blocks.1"],
        "kwargs": {"backend": "eager", "options": {}, "mode": None, "fullgraph": True, "dynamic": False},
    }
    assert COMPILE_KEY not in options["wrappers"][WrappersMP.APPLY_MODEL]
    assert "torch.compile" not in caplog.text
    assert COMPILE not in handed_over()
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


class Recording:
    """As ComfyUI keeps one for each thread."""

    def __init__(self):
        self.paused: set[int] = set()
        self.begun: list[bool] = []

    def __enter__(self):
        self.paused.add(threading.get_ident())

    def __exit__(self, *_error):
        self.paused.discard(threading.get_ident())

    def begin(self, executor, *args, **kwargs):
        """A forward that is recorded unless the option says otherwise."""
        self.begun.append(not getattr(comfy.cli_args.args, NO_COMPILER))
        return executor(*args, **kwargs)


@pytest.fixture
def recording(monkeypatch):
    made = Recording()
    monkeypatch.setattr(comfy.cli_args.args, NO_COMPILER, False, raising=False)
    monkeypatch.setattr(comfy.model_prefetch, "pause_malloc_graph", lambda: made, raising=False)
    return made


def test_nothing_is_recorded_of_a_run_in_the_pool_and_all_of_others(pair, client, recording, monkeypatch):
    stock, parallel = (one.clone() for one in pair)
    for one in (stock, parallel):
        one.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "compiler", recording.begin)
    client.sessions.open(lambda: False)
    pool, asked = client.sessions.live.pool, []
    real = type(pool).submit

    def submit(self, request, *args):
        if type(request).__name__ == "Forward":
            asked.append(threading.get_ident() in recording.paused)
        return real(self, request, *args)

    monkeypatch.setattr(type(pool), "submit", submit)
    truth = run(stock)
    assert all(recording.begun) and not recording.paused
    recording.begun.clear()
    assert relative_error(run(parallel), truth) <= BOUND
    assert asked and all(asked) and not any(recording.begun) and not recording.paused
    assert getattr(comfy.cli_args.args, NO_COMPILER) is False, "the user's option is put back"


def test_the_option_is_put_back_after_an_error_too(pair, recording):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError

    parallel = pair[1].clone()
    parallel.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "fails", fail)
    with pytest.raises(ZeroDivisionError):
        run(parallel)
    assert getattr(comfy.cli_args.args, NO_COMPILER) is False


def test_blocks_that_are_replayed_without_their_hooks_are_an_error_by_name(monkeypatch):
    outputs = []

    def work(mesh, _run):
        model = joint_model.Model(3)
        method = SequenceParallel(model, joint_model.PLAN, mesh.sequence)
        method.attach()
        outputs.append(method.forward(model, joint_model.inputs(5), 1))
        monkeypatch.setattr(model.blocks[1], "_call_impl", model.blocks[1].forward)  # no hooks any more
        with pytest.raises(ModelError, match=r"1 of 3 blocks of Model ran without the ranks' hooks"):
            method.forward(model, joint_model.inputs(5), 2)

    with torch.inference_mode():
        World(Layout(), "gloo", monkeypatch).run(work, Random(7).choice)
    assert outputs
