"""On GPUs that are late, ranks compute what they do at once: whatever moves on first, where one
leaves or fails, and whether NCCL or memory of the CPU is between them.
"""

from copy import deepcopy
from functools import cache

import pytest
import torch
from pipemesh.lab.commands.parity import BOUND, relative_error, stock_model
from pipemesh.parallel_runtime.attention.kernels import EXPLICIT, Kernels
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.families import plan_for
from pipemesh.parallel_runtime.forward import forward_name
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.weights import shared_layers
from pipemesh.parallel_runtime.weights.sharded_weights import ShardedWeights

from ..comm.test_collectives import IN_PATCHES, WARM, Rank, evaluations, truth
from ..kit.joint_model import CONDS, PLAN, Model
from ..kit.late_device import LateTensor, late_device, mapped
from ..kit.late_ranks import LateWorld, own_gpu

BLOCKS = 3
LAYOUTS = [
    (Layout(ulysses=2), "nccl"),
    (Layout(ulysses=2), "gloo"),
    (Layout(ring=3), "nccl"),
    (Layout(ring=2), "gloo"),
    (Layout(ulysses=2, ring=2), "nccl"),
    (Layout(pipefusion=2), "nccl"),
]
SEQUENCES = [one for one in LAYOUTS if one[0].pipefusion == 1]


def on_gpu(tree):
    return mapped(lambda one: one.to(own_gpu()) if isinstance(one, torch.Tensor) else one, tree)


def requests_of(layout):
    """The second of a sequence may fail, and those behind it are of another attempt."""
    return WARM + (IN_PATCHES[:8] if layout.pipefusion > 1 else [WARM[0]._replace(attempt=1)])


def computed(layout, backend, seed=0, *, at_once=False, work=None, prepare=lambda mesh, run, rank: None):
    """What came of each request on each rank, and the ranks' GPUs."""
    outputs = {}

    def begin(mesh, run, rank, model):
        model.to(own_gpu())
        prepare(mesh, run, rank)

    with pytest.MonkeyPatch.context() as patch, late_device(seed, at_once) as box:
        world = LateWorld(layout, box, patch, backend)
        inputs = lambda at, part: on_gpu(CONDS[part.branch])  # noqa: E731
        work = work or evaluations(BLOCKS, requests_of(layout), outputs, prepare=begin, inputs=inputs)
        world.run(work)
    found = {key: one.content if isinstance(one, LateTensor) else one for key, one in outputs.items()}
    return found, world.gpus


@cache
def at_once(layout, backend):
    return computed(layout, backend, at_once=True)[0]


def assert_as_at_once(found, layout, backend, but=()):
    expected = at_once(layout, backend)
    assert found.keys() == expected.keys()
    for rank, at in found.keys() - but:
        one, other = found[rank, at], expected[rank, at]
        same = torch.equal(one, other) if isinstance(other, torch.Tensor) else one is other
        assert same, f"request {at} on rank {rank}"


def of_shared_weights(outputs):
    def work(mesh, run):
        requests = requests_of(mesh.layout)
        rank, model = Rank(requests), Model(BLOCKS)
        method = make_method(model, PLAN, mesh, rank)
        mesh.sequence.share_weights(mesh.sequence.world.group)
        weights = ShardedWeights(model, own_gpu(), mesh.sequence.weights, lambda nbytes: None)
        weights.turns.attach()
        method.attach()
        for rank.at, part in enumerate(requests):
            method.begin(part)
            output = method.forward(model, on_gpu(CONDS[part.branch]), rank.at + 1)
            weights.turns.learn()
            weights.turns.end_evaluation()
            outputs[mesh.rank, rank.at] = output.to("cpu", non_blocking=True)
        weights.turns.end_run()
        method.end_run()

    return work


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_weights_that_are_gathered_beside_what_is_computed_are_there_when_their_layer_is(
    monkeypatch, backend
):
    monkeypatch.setattr(shared_layers, "TOGETHER", 9.0)  # room for two layers, as in a model of many
    for seed in (0, 3):
        found = {}
        computed(Layout(ulysses=2), backend, seed, work=of_shared_weights(found))
        assert_as_at_once(found, Layout(ulysses=2), "nccl")


@pytest.mark.cover(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layout", "backend"), LAYOUTS, ids=str)
def test_what_ranks_compute_late_is_to_the_bit_what_they_compute_at_once(layout, backend, seed):
    found, _ = computed(layout, backend, seed)
    assert_as_at_once(found, layout, backend)
    for at, part in enumerate(requests_of(layout)[:2]):
        assert torch.allclose(found[layout.writer, at], truth(part.branch, BLOCKS), atol=1e-5)


@pytest.mark.cover(3)
@pytest.mark.parametrize("what", ["stops", "fails"])
@pytest.mark.parametrize(("layout", "backend"), SEQUENCES, ids=str)
def test_ranks_leave_together_where_one_stops_or_all_fail_and_the_next_evaluation_is_right(
    layout, backend, what
):
    def prepare(mesh, run, rank):
        def holds(*_):
            return rank.at == 1 and (what == "fails" or mesh.rank == 1)

        if what == "stops":
            run.wants_stop = holds
        else:
            run.fails = holds

    found, _ = computed(layout, backend, prepare=prepare)
    left = {(rank, 1) for rank in range(layout.world_size)}
    assert {found[key] for key in left} == {Stopped if what == "stops" else ZeroDivisionError}
    assert_as_at_once(found, layout, backend, but=left)


@pytest.fixture(scope="module")
def stock():
    """A tiny model of ComfyUI's own, an evaluation, and what comes of it."""
    model = stock_model(2).model.diffusion_model
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (1, 16, 13, 12), "context": (1, 7, 64), "y": (1, 32)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given |= {"timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5]), "transformer_options": {}}
    with torch.inference_mode():
        return model, given, getattr(model, forward_name(model))(**given)


@pytest.mark.parametrize("layout", [layout for layout, backend in LAYOUTS if backend == "nccl"], ids=str)
def test_a_model_of_comfyuis_computes_late_what_stock_does(stock, layout):
    model, given, truth = stock
    outputs = {}

    def work(mesh, run):
        own = deepcopy(model)
        method = make_method(own, plan_for(type(own)), mesh, Rank([]), (), Kernels((EXPLICIT,)))
        own.to(own_gpu())
        method.attach()
        method.begin(Part(1, 0))
        outputs[mesh.rank] = method.forward(getattr(own, forward_name(own)), on_gpu(given), 1)
        method.end_run()

    for seed in (0, 3):
        computed(layout, "nccl", seed, work=work)
        assert relative_error(outputs[layout.writer].content, truth) <= BOUND
