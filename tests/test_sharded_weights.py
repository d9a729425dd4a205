"""Weights that the ranks of a sequence share out: the same numbers, an equal part of each block on
every rank, gathered block by block.
"""

from random import Random

import pytest
import torch
from pipemesh.parallel_runtime.comfy_bridge.quantised import taken_apart
from pipemesh.parallel_runtime.comfy_bridge.sharded_weights import ShardedWeights
from pipemesh.parallel_runtime.comm.exchange import Stopped
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part

from .collectives import World, disagreements, has_an_order
from .joint_model import CONDS, PLAN, Model
from .test_collectives import Rank

BLOCKS = 24
CPU = torch.device("cpu")


def own_blocks(model):
    return [block for block in model.blocks if not hasattr(block, "stands_for")]


def sharded(model, mesh):
    """The model's weights as a rank of ``mesh`` keeps them; messages go in the group of all."""
    if mesh.sequence.weights is None:
        mesh.sequence.share_weights(mesh.sequence.world.group)
    return ShardedWeights(model, own_blocks(model), CPU, mesh.sequence.weights, lambda nbytes: None)


@pytest.fixture
def computed(monkeypatch):
    """layout, backend, requests -> what each rank says of its evaluations."""

    def run(layout, backend, requests, fails=lambda rank, at: False):
        world, outputs, weights_of = World(layout, backend, monkeypatch), {}, {}

        def work(mesh, run):
            rank, model = Rank(requests), Model(BLOCKS)
            method = make_method(model, PLAN, mesh, rank)
            weights = weights_of[mesh.rank] = sharded(model, mesh)
            own_blocks(model)[1].register_forward_pre_hook(lambda *_: stumble(mesh.rank, rank.at))
            weights.turns.attach()
            method.attach()
            for rank.at, part in enumerate(requests):
                method.begin(part)
                try:
                    outputs[mesh.rank, rank.at] = method.evaluate(model, CONDS[part.branch], rank.at + 1)
                except (Stopped, ModelError, ZeroDivisionError) as error:
                    outputs[mesh.rank, rank.at] = type(error)
                outputs[mesh.rank, rank.at, "sent"] = mesh.sequence.weights.sent_bytes
                weights.turns.end_evaluation()
                assert method.facts.messages_done == "all"
            weights.turns.end_run()
            method.end_run()

        def stumble(rank, at):
            if fails(rank, at):
                raise ZeroDivisionError

        with torch.inference_mode():
            traces = world.run(work, Random(7).choice)
        assert disagreements(traces, world.members) == []
        assert has_an_order(traces, in_order=backend == "nccl")
        return outputs, weights_of

    return run


def truth(branch):
    with torch.inference_mode():
        return Model(BLOCKS)(**CONDS[branch])


def block_bytes(model):
    return sum(parameter.nbytes for block in model.blocks for parameter in block.parameters())


LAYOUTS = [Layout(ulysses=2), Layout(ring=3), Layout(ulysses=2, ring=2), Layout(ulysses=2, pipefusion=2)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_every_rank_has_the_weights_of_a_block_while_it_computes(computed, layout, backend):
    requests = [Part(1, 0), Part(1, 1), Part(1, 0)]
    outputs, _ = computed(layout, backend, requests)
    for at, part in enumerate(requests):
        assert torch.allclose(outputs[layout.writer, at], truth(part.branch), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_an_evaluation_sends_each_part_to_the_others_once(computed, layout):
    outputs, _ = computed(layout, "gloo", [Part(1, 0)])
    ranks = layout.ulysses * layout.ring
    due = block_bytes(Model(BLOCKS)) / layout.pipefusion * (ranks - 1) / ranks
    for rank in range(layout.world_size):
        assert outputs[rank, 0, "sent"] == pytest.approx(due, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_together_hold_little_more_than_one_model(computed, ranks):
    _, weights_of = computed(Layout(ulysses=ranks), "gloo", [Part(1, 0)])
    whole = sum(parameter.nbytes for parameter in Model(BLOCKS).parameters())
    two_blocks = 2 * block_bytes(Model(BLOCKS)) / BLOCKS
    assert sum(weights.nbytes for weights in weights_of.values()) <= 1.02 * whole + ranks * (two_blocks + 64)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", [Layout(ulysses=3), Layout(ulysses=2, pipefusion=2)], ids=Layout.equation)
def test_a_rank_that_fails_still_gives_its_part_of_the_weights(computed, layout, backend):
    requests = [Part(1, 0), Part(1, 0), Part(1, 0), Part(2, 0)]
    outputs, _ = computed(layout, backend, requests, fails=lambda rank, at: rank == 1 and at in (0, 2))
    assert outputs[1, 0] is outputs[1, 2] is ZeroDivisionError
    assert torch.allclose(outputs[layout.writer, 3], truth(0), atol=1e-5)


# -- one rank's part


@pytest.fixture
def alone(monkeypatch):
    """A model whose weights one rank alone has in parts, and they."""
    mesh = World(Layout(), "gloo", monkeypatch).meshes[0]
    model = Model(3)
    with torch.inference_mode():
        return model, sharded(model, mesh)


NAME = "diffusion_model.blocks.1.qkv.weight"


def during(model, weights):
    """The weight as the block has it while it computes."""
    seen, options = [], {"transformer_options": {}}
    weights.turns.attach()
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: seen.append(model.blocks[1].qkv.weight.clone()))
    with torch.inference_mode():
        model(**{**CONDS[1], **options})
    handle.remove()
    weights.turns.detach()
    return seen[0]


def test_outside_of_its_turn_a_block_has_weights_of_the_same_kind_without_content(alone):
    model, weights = alone
    before = Model(3).blocks[1].qkv.weight
    assert torch.equal(during(model, weights), before)
    after = model.blocks[1].qkv.weight
    assert (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device)
    assert after.isnan().all() and after.untyped_storage().nbytes() <= 8
    assert torch.equal(model.head.weight, Model(3).head.weight), "what is outside of the blocks stays"


def test_a_patched_weight_replaces_its_part_and_goes_again(alone):
    model, weights = alone
    loaded = weights.get(NAME).clone()
    with torch.inference_mode():
        with weights.in_place(NAME):
            assert torch.equal(model.blocks[1].qkv.weight, loaded)
        weights.replace(NAME, taken_apart(loaded + 1))
        assert torch.equal(during(model, weights), loaded + 1)
        weights.replace(NAME, torch.ones(2, 3))  # of another size
        assert torch.equal(model.blocks[1].qkv.weight, torch.ones(2, 3))
        weights.restore()
    assert torch.equal(during(model, weights), loaded)


def test_a_parameter_of_two_modules_stays_whole():
    from types import SimpleNamespace

    model = Model(2)
    model.blocks[1].qkv.weight = model.blocks[0].qkv.weight
    weights = ShardedWeights(model, list(model.blocks), CPU, SimpleNamespace(rank=0, size=1, via_cpu=False), lambda nbytes: None)
    assert model.blocks[0].qkv.weight is model.blocks[1].qkv.weight
    assert not model.blocks[0].qkv.weight.isnan().any() and model.blocks[0].qkv.bias.isnan().all()
    assert weights.has(NAME) and weights.has("diffusion_model.blocks.1.qkv.bias") and not weights.has("diffusion_model.blocks.7.qkv.bias")
