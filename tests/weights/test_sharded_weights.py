"""Weights that the ranks of a sequence share out: the same numbers, an equal part of each layer on
every rank, gathered block by block; here a block has one layer.
"""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.released_model import empty_model
from pipemesh.parallel_runtime.comm.shard_gather import ShardGather
from pipemesh.parallel_runtime.comm.traffic import Stopped
from pipemesh.parallel_runtime.errors import ModelError, Refused
from pipemesh.parallel_runtime.families.catalogue import RELEASED
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode
from pipemesh.parallel_runtime.planner.keeping import model_bytes, module_bytes
from pipemesh.parallel_runtime.planner.prediction import sharded_bytes
from pipemesh.parallel_runtime.refusals import require_plan
from pipemesh.parallel_runtime.weights.main_memory import LEAST_BYTES, OF_MODEL, InMainMemory, tables_of
from pipemesh.parallel_runtime.weights.placeholder import Placeholder
from pipemesh.parallel_runtime.weights.quantisation import taken_apart
from pipemesh.parallel_runtime.weights.sharded_weights import ShardedWeights
from pipemesh.parallel_runtime.weights.shared_layers import (
    LEFT_WHOLE,
    TOGETHER,
    Layer,
    Sharing,
    gathered_together,
    least_shared,
)

from ..comm.test_collectives import Rank
from ..fixtures import ALL
from ..kit.collectives import World, disagreements, has_an_order
from ..kit.joint_model import CONDS, PLAN, Model

BLOCKS = 24
CPU = torch.device("cpu")


def sharded(model, mesh):
    """The model's weights as a rank of ``mesh`` keeps them; messages go in the group of all."""
    if mesh.sequence.weights is None:
        mesh.sequence.share_weights(mesh.sequence.world.group)
    return ShardedWeights(model, CPU, mesh.sequence.weights, lambda nbytes: None)


@pytest.fixture
def computed(monkeypatch):
    """layout, backend, requests -> what each rank says of its evaluations. ``widths``: how many
    groups share each, one by default; ``asked``: whether a rank is asked for it.
    """

    def run(layout, backend, requests, fails=lambda rank, at: False, widths=(), asked=lambda rank, at: True):
        world, outputs, weights_of = World(layout, backend, monkeypatch), {}, {}

        def work(mesh, run):
            rank, model = Rank(requests), Model(BLOCKS)
            method = make_method(model, PLAN, mesh, rank)
            weights = weights_of[mesh.rank] = sharded(model, mesh)
            own = [block for block in model.blocks if not hasattr(block, "stands_for")]
            own[1].register_forward_pre_hook(lambda *_: stumble(mesh.rank, rank.at))
            weights.turns.attach()
            method.attach()
            for rank.at, part in enumerate(requests):
                if not asked(mesh.rank, rank.at):
                    continue
                mesh.sequence.use(widths[rank.at] if widths else 1)
                method.begin(part)
                try:
                    with weights.turns.evaluation():
                        outputs[mesh.rank, rank.at] = method.forward(model, CONDS[part.branch], rank.at + 1)
                        weights.turns.learn()
                except (Stopped, ModelError, ZeroDivisionError) as error:
                    outputs[mesh.rank, rank.at] = type(error)
                outputs[mesh.rank, rank.at, "sent"] = mesh.sequence.traffic.sent_bytes["weights"]
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


LAYOUTS = [Layout(ulysses=2), Layout(ring=3), Layout(ulysses=2, ring=2), Layout(ulysses=2, pipefusion=2)]


@pytest.mark.cover(3)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_every_rank_has_the_weights_of_a_layer_while_it_computes_and_sends_its_part_of_them_once(
    computed, layout, backend
):
    """In the first evaluation, and in those that know which layer comes next."""
    requests = [Part(1, 0), Part(1, 1), Part(1, 0)]
    outputs, weights_of = computed(layout, backend, requests)
    for at, part in enumerate(requests):
        assert torch.allclose(outputs[layout.writer, at], truth(part.branch), atol=1e-5)
        for rank, weights in weights_of.items():
            assert outputs[rank, at, "sent"] == due(layout, rank, weights)


def due(layout, rank, weights):
    """The bytes that a rank sends of its parts of the layers that it computes."""
    parts = {id(block): block.part.nbytes for block, _ in weights._sharded.values()}
    head, _ = weights._sharded["diffusion_model.head.weight"]
    if layout.stage(rank) < layout.stages - 1:
        del parts[id(head)]  # only the last stage computes it
    return (layout.sequence_size - 1) * sum(parts.values())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", [Layout(ulysses=3), Layout(ring=2)], ids=Layout.equation)
def test_where_all_ranks_fail_with_weights_on_their_way_the_next_evaluation_is_right(
    computed, layout, backend
):
    """Before they know which block follows which, and when they send for one ahead."""
    requests = [Part(1, 0, attempt=attempt) for attempt in (0, 1, 1, 2)]
    outputs, _ = computed(layout, backend, requests, fails=lambda rank, at: at in (0, 2))
    assert outputs[1, 0] is outputs[1, 2] is ZeroDivisionError
    assert all(torch.allclose(outputs[layout.writer, at], truth(0), atol=1e-5) for at in (1, 3))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_groups_that_share_a_sequence_have_one_order_whichever_has_learned_more(computed, backend):
    """All fail, one group goes on alone, then both again."""
    outputs, _ = computed(
        Layout(ulysses=2, cfg=2),
        backend,
        [Part(1, 0, attempt=attempt) for attempt in (0, 1, 1, 1, 2)],
        fails=lambda rank, at: at in (0, 3),
        widths=(2, 1, 2, 2, 2),
        asked=lambda rank, at: at != 1 or rank < 2,
    )
    assert outputs[1, 0] is outputs[1, 3] is ZeroDivisionError
    assert all(torch.allclose(outputs[0, at], truth(0), atol=1e-5) for at in (1, 2, 4))


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
    """The weight as the layer has it while it computes."""
    seen, options = [], {"transformer_options": {}}
    weights.turns.attach()
    handle = model.blocks[1].qkv.register_forward_pre_hook(
        lambda *_: seen.append(model.blocks[1].qkv.weight.clone())
    )
    with torch.inference_mode():
        model(**{**CONDS[1], **options})
    handle.remove()
    weights.turns.detach()
    return seen[0]


def test_outside_of_its_turn_a_layers_weight_says_what_it_is_and_is_an_error_where_it_is_computed_with(alone):
    model, weights = alone
    before = Model(3).blocks[1].qkv.weight
    assert torch.equal(during(model, weights), before)
    after = model.blocks[1].qkv.weight
    assert (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device)
    assert [one.shape for one in model.state_dict().values()] == [
        one.shape for one in Model(3).state_dict().values()
    ]
    for read in (
        lambda: after + 1,
        lambda: torch.nn.functional.linear(torch.zeros(1, after.shape[1]), after),
        lambda: after[0],
    ):
        with pytest.raises(Refused, match=r"^blocks\.1\.qkv\.weight was read outside of its layer's forward"):
            read()


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
    model = Model(2)
    model.blocks[1].qkv.weight = model.blocks[0].qkv.weight
    weights = ShardedWeights(model, CPU, SimpleNamespace(rank=0, size=1, via_cpu=False), lambda nbytes: None)
    assert model.blocks[0].qkv.weight is model.blocks[1].qkv.weight
    assert not isinstance(model.blocks[0].qkv.weight, Placeholder)
    assert isinstance(model.blocks[0].qkv.bias, Placeholder)
    assert weights.has(NAME) and weights.has("diffusion_model.blocks.1.qkv.bias")
    assert not weights.has("diffusion_model.blocks.7.qkv.bias")


@pytest.fixture
def turns(alone, monkeypatch):
    """Evaluate once -> what happened, in order: an index when a layer is sent for, "computes" and
    it when it does. ``skip``: a block that is left out.
    """
    model, weights = alone
    happened, start = [], ShardGather.start
    monkeypatch.setattr(
        ShardGather,
        "start",
        lambda self, part, whole: happened.append(index_of(part)) or start(self, part, whole),
    )
    weights.turns.attach()

    def index_of(part):
        return next(index for index, one in enumerate(weights.turns._blocks) if one.part is part)

    layers = [*(block.qkv for block in model.blocks), model.head]
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: happened.append(("computes", index)))

    def evaluated(skip=None):
        happened.clear()
        whole = Model(3)
        for one in (model, whole):
            if skip is not None:
                one.blocks[skip].forward = lambda txt, img, mask, options: (txt, img)
        with torch.inference_mode():
            assert torch.equal(model(**{**CONDS[1], "transformer_options": {}}), whole(**CONDS[1]))
        weights.turns.learn()
        weights.turns.end_evaluation()
        if skip is not None:
            del model.blocks[skip].forward
        return list(happened)

    return weights.turns, evaluated


def test_the_weights_of_the_next_layer_are_sent_for_before_one_computes(turns):
    _, evaluated = turns
    assert evaluated() == [0, ("computes", 0), 1, ("computes", 1), 2, ("computes", 2), 3, ("computes", 3)]
    known = [0, 1, ("computes", 0), 2, ("computes", 1), 3, ("computes", 2), ("computes", 3)]
    assert evaluated() == evaluated() == known


def test_a_rank_that_fails_does_not_wait_for_a_gather_that_the_others_may_never_start(turns, monkeypatch):
    own, evaluated = turns
    waited = []
    monkeypatch.setattr(ShardGather, "wait", lambda self: waited.append(True))
    for error, waits in ((ZeroDivisionError, False), (Stopped, True)):
        with pytest.raises(error), own.evaluation():
            raise error
        assert bool(waited) is waits
    monkeypatch.undo()
    evaluated()


def test_a_layer_that_is_left_out_was_sent_for_in_vain(turns):
    _, evaluated = turns
    evaluated()
    assert evaluated(skip=1) == [0, 1, ("computes", 0), 2, ("computes", 2), 3, ("computes", 3)]
    assert evaluated()[:3] == [0, 1, ("computes", 0)]


def test_where_two_layers_have_no_room_the_next_one_is_sent_for_in_its_turn(turns):
    own, evaluated = turns
    own.room_bytes //= 2
    first = evaluated()
    assert evaluated()[:4] == first[:4] == [0, ("computes", 0), 1, ("computes", 1)]


# -- which layers, and how much room


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_room_is_for_two_layers_or_for_as_many_as_keep_the_ranks_within_their_bound(ranks):
    sizes = (0, 1000, 10, 20), (10, 990, 15, 30), (0, 1000, 200, 400)
    small, large, huge = (Sharing(*size, by_layer=True) for size in sizes)
    assert small.room(ranks) == (20 if ranks < 8 else 16)
    assert ranks * large.held(ranks) <= TOGETHER * 1000 or large.room(ranks) == large.largest
    assert huge.room(ranks) >= 200, "a layer needs its weights"
    assert huge.held(1) == 1000
    assert Sharing(*sizes[2]).room(ranks) == 400, "of blocks there is room for two"


ONE_LARGE_LAYER = "ideogram4-9.3b"  # which needs its weights while it computes


@pytest.mark.parametrize("name", RELEASED if ALL else [*list(RELEASED)[3::12], *list(RELEASED)[::20]])
def test_the_ranks_of_a_sequence_hold_little_more_than_one_released_model(name):
    """Tables of positions and of tokens are in the machine's memory, which all of them map."""
    model = empty_model(*RELEASED[name], torch.bfloat16, torch.device("meta")).diffusion_model
    size, whole = model_bytes(model, require_plan(model)), module_bytes(model)
    blocks = 0, len(size.block_weight_bytes)

    def held(ranks):
        return sharded_bytes(size, Layout(ulysses=ranks), blocks, by_layer=True)

    assert held(1) + size.shareable.aside == size.weight_bytes == whole
    above = [ranks for ranks in (2, 3, 4, 8) if ranks * held(ranks) > 1.15 * whole]
    assert above == ([8] if name == ONE_LARGE_LAYER else [])


def test_layers_of_a_block_are_gathered_together_and_those_around_them_alone():
    paths = "img_in", "blocks.0.qkv", "blocks.0.mlp.0", "blocks.1.qkv", "embed.mlp.0", "embed.mlp.2", "head"
    together = gathered_together([Layer(path, torch.nn.Identity(), {}) for path in paths])
    assert [[layer.path for layer in some] for some in together] == [
        ["img_in"],
        ["blocks.0.qkv", "blocks.0.mlp.0"],
        *([path] for path in paths[3:]),
    ]


def test_the_smallest_layers_stay_whole_while_they_are_next_to_nothing():
    sizes = [1] * 5 + [7 * LEFT_WHOLE]
    assert least_shared(sizes) == 1 + 7 * LEFT_WHOLE - 1
    assert least_shared([3, 3, 3]) == 3
    assert least_shared([]) == 0


# -- tables that stay in the machine's memory


class WithTables(torch.nn.Module):
    """A table of positions and one of tokens, beside a layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = torch.nn.Linear(256, 256)
        self.tokens = torch.nn.Embedding(2048, 256)
        self.register_buffer("positions", torch.randn(1, 2048, 256, generator=generator))
        self.register_buffer("few", torch.randn(1, 8, 256, generator=generator))

    def forward(self, numbers):
        grid = self.positions.reshape(1, 64, 32, 256)[:, 2:6, 3:5].flatten(1, 2)
        return self.layer(self.tokens(numbers) + grid + self.few)


def tables(model):
    return {table.name: table for table in tables_of(model)}


@torch.inference_mode()
def test_large_tensors_that_no_layer_has_stay_in_main_memory_and_change_no_bit(monkeypatch):
    model, numbers = WithTables(), torch.arange(8).reshape(1, 8) * 255
    before = model(numbers)
    kept = {name: table.tensor for name, table in tables(model).items()}
    assert set(kept) == {"tokens.weight", "positions"}
    weights = sharded(model, World(Layout(), "gloo", monkeypatch).meshes[0])
    assert all(isinstance(tensor, InMainMemory) for tensor in (model.tokens.weight, model.positions))
    weights.turns.attach()
    assert torch.equal(model(numbers), before)
    assert weights.nbytes < sum(tensor.nbytes for tensor in kept.values())
    whole = module_bytes(model)
    assert all(one.nbytes >= LEAST_BYTES and one.nbytes * OF_MODEL > whole for one in kept.values())


@torch.inference_mode()
def test_a_table_that_is_patched_is_that_table_until_the_patch_goes(monkeypatch):
    model, numbers, name = WithTables(), torch.arange(8).reshape(1, 8), "diffusion_model.tokens.weight"
    loaded = model.tokens.weight
    weights = sharded(model, World(Layout(), "gloo", monkeypatch).meshes[0])
    assert weights.has(name) and weights.get(name) is loaded
    with weights.in_place(name):
        assert model.tokens.weight is loaded
    weights.replace(name, loaded + 1)
    assert torch.equal(model.tokens(numbers), torch.nn.functional.embedding(numbers, loaded + 1))
    weights.restore()
    assert torch.equal(model.tokens(numbers), torch.nn.functional.embedding(numbers, loaded))


def test_only_the_rows_that_are_read_come_to_the_device():
    with dry_device(QuickFakeMode()) as counts:
        table, tokens = (InMainMemory(torch.zeros(4096, 64), DEVICE) for _ in range(2))
        rows = table.view(64, 64, 64)[2:4].flatten(0, 1) + torch.zeros(128, 64, device=DEVICE)
        named = torch.nn.functional.embedding(torch.zeros(5, dtype=torch.long, device=DEVICE), tokens)
        assert rows.device == named.device == table.device == DEVICE
        assert (rows.shape, named.shape) == ((128, 64), (5, 64))
    assert 0 < counts.memory.peak < table.nbytes / 8
