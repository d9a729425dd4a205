"""A GPU that is not there: it counts what a real one would do, and finds what would go wrong on it.

The pack's own code on it never waits for it, but for what it must read.
"""

import gc
from collections import Counter
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from pipemesh.lab.dry_run.device import WatchedDevice, dry_device
from pipemesh.lab.dry_run.ranks import TURN, IdleRank, joined
from pipemesh.parallel_runtime.attention.merge_operation import in_one
from pipemesh.parallel_runtime.attention.merging import Partial, merge_partials
from pipemesh.parallel_runtime.comm.exchange import LOOK_AHEAD, Stopped
from pipemesh.parallel_runtime.comm.mesh import open_weights
from pipemesh.parallel_runtime.layout import Layout, layouts_of
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE, is_on_device
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode, TensorForm
from pipemesh.parallel_runtime.weights.sharded_weights import ShardedWeights
from pipemesh.parallel_runtime.wire.segment import Segment, TensorRef
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kit.joint_model import IMAGE, PLAN, WIDTH, Model, inputs

MIB = 1 << 20
WARM, PATCHES = Part(1, 0), [Part(1, 0, patch) for patch in ((0, 4, False), (4, 4, False), (8, 5, True))]


@pytest.fixture
def mode():
    return QuickFakeMode()


def on_device(arguments):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)


def run(mode, layout, rank, parts, number=TURN, value=0.0, blocks=8, via_cpu=False, sharded=False, **conds):
    """Compute parts of an evaluation as one rank of ``layout``. Returns counts and method."""
    stages = layout.pipefusion
    with joined(layout, rank, via_cpu) as mesh:
        with dry_device(mode), DEVICE:
            model, arguments = Model(blocks), {**on_device(inputs(5)), **conds}
        idle = IdleRank(parts)
        method = make_method(model, PLAN, mesh, idle, [blocks // stages] * stages if stages > 1 else ())
        turns = shared_out(mode, model, mesh) if sharded else None
        method.attach()
        with dry_device(mode) as counts:
            for idle.at, part in enumerate(parts):
                counts.value = value if idle.at == len(parts) - 1 else 0.0
                method.begin(part)
                method.forward(model, arguments, number + TURN * idle.at)
                if turns is not None:
                    turns.learn()
                    turns.end_evaluation()
        return counts, method


def shared_out(mode, model, mesh):
    open_weights(mesh)
    with dry_device(mode):
        turns = ShardedWeights(model, DEVICE, mesh.sequence.weights, lambda nbytes: None).turns
    turns.attach()
    return turns


# -- what it counts


def test_kernels_count_by_the_bytes_that_they_read_and_write_but_for_products_and_views(mode):
    with dry_device(mode) as counts, DEVICE:
        rows, row = torch.empty(4, 8), torch.empty(8)
        rows.add_(row).t().view(8, 4)
        rows.expand(2, 4, 8).copy_(rows)
        torch.zeros(16)
        rows @ rows.t()
    assert counts.moved - Counter({0: counts.moved[0]}) == {4 * (32 + 8 + 32): 1, 4 * (32 + 32): 1, 4 * 16: 1}


def test_an_operation_of_the_packs_own_counts_by_what_it_stands_for_and_beside_that_as_one(mode):
    with dry_device(mode) as counts, DEVICE:
        parts = [Partial(torch.empty(1, 2, 4, 8), torch.empty(1, 2, 4), 3.0) for _ in range(2)]
        merge_partials(*parts)
        alone, moved = counts.launches, counts.moved.copy()
        assert alone > 10 and counts.spared == 0
        in_one(*parts)
    counts.moved[0] = moved[0] = 0  # what moves nothing is no kernel
    assert counts.launches == 2 * alone and counts.moved == moved + moved
    assert counts.launches - counts.spared == alone + 1


def test_memory_counts_until_the_last_view_has_gone(mode):
    with dry_device(mode) as counts:
        first = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        half = first[: MIB // 2]
        second = torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)
        torch.empty(8 * MIB, dtype=torch.uint8)  # not on the device
        assert counts.memory.live == counts.memory.peak == 3 * MIB
        del first, second
        assert counts.memory.live == MIB
        del half
    assert (counts.memory.live, counts.memory.peak) == (0, 3 * MIB)


def test_a_product_and_an_attention_count_their_flops_and_hold_no_scores(mode):
    with dry_device(mode) as counts:
        torch.nn.functional.linear(torch.empty(1, 5, 7, device=DEVICE), torch.empty(11, 7, device=DEVICE))
        assert counts.flops == 2 * 5 * 7 * 11
        q, k, v = (torch.empty(1, 2, 1000, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert counts.flops == 2 * 5 * 7 * 11 + 2 * 2 * 2 * 1000 * 1000 * 64
    assert counts.memory.peak < 2 * 2 * 1000 * 1000


def test_a_mask_chooses_the_share_that_it_is_said_to(mode):
    with dry_device(mode) as counts:
        counts.chosen = 0.25
        rows, mask = torch.empty(12, 7, device=DEVICE), torch.empty(12, dtype=torch.bool, device=DEVICE)
        assert rows[mask].shape == (3, 7)
        rows[mask] = torch.empty(3, 7, device=DEVICE)
        assert rows[torch.zeros(2, dtype=torch.long, device=DEVICE)].shape == (2, 7)
    assert sum(counts.waits.values()) == 2


def test_two_devices_in_one_operation_are_found_in_a_method(mode):
    with pytest.raises(RuntimeError, match="devices"):
        run(mode, Layout(ulysses=2), 1, [WARM], mask=torch.zeros(18, 18))


@pytest.mark.cover(6)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize(
    "layout",
    [Layout(ulysses=2, ring=2), Layout(ulysses=2, pipefusion=2), Layout(ring=2, pipefusion=2)],
    ids=Layout.equation,
)
def test_messages_that_go_through_the_cpu_are_those_of_a_gpu_and_never_meet_what_lies_there(
    mode, layout, sharded, monkeypatch
):
    """As over gloo: an operation on tensors of both raises. Weights too are gathered there."""
    places, note = Counter(), WatchedDevice.note_message

    def note_place(self, func, args):
        places[any(is_on_device(tensor) for tensor in tree_leaves(args))] += 1
        note(self, func, args)

    monkeypatch.setattr(WatchedDevice, "note_message", note_place)
    parts = [WARM, *PATCHES] if layout.pipefusion > 1 else [WARM, WARM]
    for rank in (0, layout.world_size - 1):
        direct, _ = run(mode, layout, rank, parts, blocks=4, sharded=sharded)
        places.clear()
        through, _ = run(mode, layout, rank, parts, blocks=4, sharded=sharded, via_cpu=True)
        assert set(places) == {False}
        assert through.messages == direct.messages and through.flops == direct.flops
    if layout.pipefusion == 1:
        with pytest.raises(Stopped):
            run(mode, layout, rank, parts, blocks=4, sharded=sharded, via_cpu=True, value=1.0)


CALLS = [
    lambda x: x.chunk(2, 1),
    lambda x: x.add_(1),
    lambda x: x.mul(2),
    lambda x: x.mul(2.0),
    lambda x: x.t(),
    lambda x: x.reshape(8, 2),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    lambda x: x.to(torch.float64),
    lambda x: x.max(1),
    lambda x: x.sum(),
]


def form_made(call, tensor):
    """What it returns, and which of that lies in the tensor's own memory."""
    try:
        leaves = tree_leaves(call(tensor))
    except RuntimeError:
        return "refused"
    own = tensor.untyped_storage()._cdata
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    forms = [(TensorForm.of(leaf), leaf.untyped_storage().nbytes()) for leaf in fakes]
    return forms, [leaf.untyped_storage()._cdata == own for leaf in leaves]


def forms_made(mode):
    """What a few operations return, each on tensors that differ in one thing, and then again."""
    with dry_device(mode) as counts:
        whole, flat = torch.empty(4, 4, device=DEVICE), torch.empty(16, device=DEVICE)
        tensors = whole, whole.t(), whole[:2], whole.to(torch.bfloat16), torch.empty(4, 4), flat.view(4, 4)
        made = [form_made(call, tensor) for _ in range(2) for call in CALLS for tensor in tensors]
    return made, counts.memory.peak, counts.memory.live


def counted(mode, layout, parts):
    """What a run counts, with tensors that lie in cycles freed behind it and not at any time."""
    gc.collect()
    gc.disable()
    try:
        return run(mode, layout, layout.world_size - 1, parts)[0]
    finally:
        gc.enable()
        gc.collect()


def test_what_an_operation_returned_before_it_returns_again(mode):
    slow = FakeTensorMode(allow_non_fake_inputs=True)
    assert forms_made(mode) == forms_made(slow)
    layout = Layout(ulysses=2, pipefusion=2)
    quick_counts, slow_counts = (counted(one, layout, [WARM, *PATCHES]) for one in (mode, slow))
    for name in ("flops", "moved", "memory.live", "memory.peak", "messages", "waits"):
        assert attrgetter(name)(quick_counts) == attrgetter(name)(slow_counts)
    assert quick_counts.flops > 0


# -- what the pack's code must not do on it


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "layout", [layout for layout in layouts_of(4) if layout.groups == 1], ids=Layout.equation
)
def test_no_evaluation_and_no_patch_waits_for_the_device(mode, layout):
    parts = [WARM, *PATCHES] if layout.pipefusion > 1 else [WARM]
    for rank in {0, layout.world_size - 1}:
        with dry_device(mode):
            mask = torch.zeros(18, 18, device=DEVICE)
        assert run(mode, layout, rank, parts, blocks=4, mask=mask)[0].waits == {}


def test_an_input_is_read_from_the_arena_without_waiting_for_the_device(mode):
    arena = Segment.create("dry", MIB)
    with dry_device(mode) as counts:
        io = ArenaIO(arena, DEVICE)
        for version in (0, 3):
            assert io.tensor(TensorRef(64, (4, 1 << 15), "float32", version=version)).device == DEVICE
    assert counts.waits == {}
    arena.close()


class Controlled(Model):
    def forward(self, txt, img, mask, transformer_options, control):
        return super().forward(txt, img, mask, transformer_options) + control["output"][0].sum()


def test_residuals_of_a_controlnet_come_to_the_device_without_waiting_for_it(mode):
    plan = replace(PLAN, blocks=(replace(PLAN.blocks[0], control="output"),))
    residuals = [torch.zeros(1 << 10, IMAGE, WIDTH), None]
    with dry_device(mode), DEVICE:
        model, arguments = Controlled(2), on_device(inputs(5))
    with joined(Layout(ulysses=2), 1) as mesh, dry_device(mode) as counts:
        method = make_method(model, plan, mesh, IdleRank([WARM]), ())
        method.attach()
        method.begin(WARM)
        method.forward(model, {**arguments, "control": {"output": residuals}}, TURN)
    assert counts.waits == {}


@pytest.mark.cover(5)
@pytest.mark.parametrize("blocks", [2, 4, LOOK_AHEAD, LOOK_AHEAD + 2, 3 * LOOK_AHEAD])
@pytest.mark.parametrize(
    "layout",
    [Layout(ulysses=2), Layout(ring=2), Layout(ulysses=2, pipefusion=2), Layout(ring=2, pipefusion=2)],
    ids=Layout.equation,
)
def test_a_wish_to_stop_is_read_in_the_evaluation_it_is_made_in_however_few_its_attentions(
    mode, layout, blocks
):
    # The first time ranks compare their tokens
    parts = [WARM, PATCHES[0], PATCHES[0]] if layout.pipefusion > 1 else [WARM, WARM]
    with pytest.raises(Stopped):
        run(mode, layout, 0, parts, value=1.0, blocks=blocks)


@pytest.mark.parametrize(
    ("rank", "parts"), [(1, [WARM, *PATCHES]), (2, [WARM, *PATCHES]), (2, [WARM])], ids=str
)
def test_a_message_of_another_request_is_found_on_the_device(mode, rank, parts):
    """The number that comes is 0, the one that is due 1; the last stage looks before its output
    leaves, another one some patches later.
    """
    run(mode, Layout(pipefusion=3), rank, parts, blocks=9)
    with pytest.raises(RuntimeError, match="out of step"):
        run(mode, Layout(pipefusion=3), rank, parts, number=TURN + 1, blocks=9)


def test_a_message_of_another_request_is_found_by_the_end_of_the_run(mode):
    _, method = run(mode, Layout(pipefusion=3), 1, [WARM], number=TURN + 1, blocks=9)
    with dry_device(mode), pytest.raises(RuntimeError, match="out of step"):
        method.end_run()
    method.end_run()
