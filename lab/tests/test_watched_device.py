"""The device that is not there sees what a real one would be waited for, and what is computed on
which rows.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.rows import LayerOrder, OwnRows
from pipemesh.parallel_runtime.families.sample import TokenParts
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
from pipemesh.parallel_runtime.planner.fake_mode import QuickFakeMode

MIB = 1 << 20


@pytest.fixture
def mode():
    return QuickFakeMode()


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda cpu, gpu: bool(gpu[0] > 0), 1),
        (lambda cpu, gpu: torch.equal(gpu, gpu), 1),
        (lambda cpu, gpu: gpu.cpu(), 1),
        (lambda cpu, gpu: gpu.to("cpu", non_blocking=True), 1),  # into ordinary memory
        (lambda cpu, gpu: cpu.to(DEVICE), 1),
        (lambda cpu, gpu: gpu.copy_(cpu), 1),
        (lambda cpu, gpu: torch.cuda.current_stream().synchronize(), 1),
        (lambda cpu, gpu: cpu.to(DEVICE, non_blocking=True), 0),
        (lambda cpu, gpu: gpu.copy_(cpu, non_blocking=True), 0),
        # The driver may wait before it stages so much
        (lambda cpu, gpu: torch.zeros(MIB).to(DEVICE, non_blocking=True), 1),
        (lambda cpu, gpu: torch.empty(MIB, device=DEVICE).copy_(torch.zeros(MIB), non_blocking=True), 1),
        (lambda cpu, gpu: torch.empty(MIB, pin_memory=True).to(DEVICE, non_blocking=True), 0),
        (lambda cpu, gpu: torch.empty(4, pin_memory=True).copy_(gpu, non_blocking=True), 0),
        (lambda cpu, gpu: gpu.fill_(3), 0),
        (lambda cpu, gpu: gpu.to(torch.float64) + 1.0, 0),
        (lambda cpu, gpu: bool(cpu[0] > 0), 0),
    ],
)
def test_what_makes_the_cpu_wait_is_counted_where_it_is_called(mode, call, waits):
    with dry_device(mode) as counts:
        cpu, gpu = torch.zeros(4), torch.zeros(4, device=DEVICE)
        call(cpu, gpu)
    assert sum(counts.waits.values()) == waits
    assert all(wait.file == __file__ and wait.is_ours for wait in counts.waits)


@pytest.mark.parametrize(("behind", "waits"), [(0, 1), (1, 0)])
def test_to_wait_for_a_place_in_the_queue_is_counted_where_nothing_is_enqueued_behind_it(mode, behind, waits):
    with dry_device(mode) as counts, DEVICE:
        row, event = torch.empty(4, 4), torch.cuda.Event()
        row @ row
        event.record()
        for _ in range(behind):
            row @ row
        row + row
        event.synchronize()
    assert sum(counts.waits.values()) == waits


def test_flops_are_told_by_the_rows_of_products_and_queries(mode):
    with dry_device(mode) as counts:
        linear = torch.nn.functional.linear
        empty = partial(torch.empty, device=DEVICE)
        linear(empty(1, 5, 7), empty(11, 7), empty(11))
        q, k = (empty(1, 2, length, 8, dtype=torch.bfloat16) for length in (9, 5))
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.nn.functional.conv2d(empty(1, 3, 9, 9), empty(3, 3, 3, 3))
    assert counts.by_rows[5] == 2 * 5 * 7 * 11
    assert counts.by_rows[9] == 2 * 2 * 2 * 9 * 5 * 8
    assert sum(counts.by_rows.values()) == counts.flops and counts.by_rows[0] > 0


def test_what_a_block_computes_on_rows_of_its_own_is_every_ranks():
    """Of text and image, of a part of them that an expert has, and of tokens before them."""
    own = OwnRows({"txt": 3, "img": 8}, prefix=5, cut=TokenParts(experts=4, chosen=2))
    alone = dict.fromkeys((3, 8, 11, 4), 0) | dict.fromkeys((7, 2, 12), 70)
    for rows, due in (alone | {16: 70 * 5 / 16, 13: 70 * 5 / 13}).items():
        assert own.apart(Counter(), Counter({rows: 70})).alone == round(due)
    assert own.apart(Counter({7: 70}), Counter({7: 90, 8: 10})).alone == 20
    chunked = OwnRows({"img": 22}, prefix=0, cut=TokenParts(chunks=(2, 4)))
    none = [rows for rows in range(23) if not chunked.apart(Counter(), Counter({rows: 1})).alone]
    assert none == [4, 6, 11, 22]


def test_the_turn_of_a_layer_comes_again_where_two_others_have_computed_meanwhile():
    order = LayerOrder()
    notes = {name: order.note(name) for name in "abc"}
    for name in "aabababcbcacba":
        notes[name]()
    assert "".join(order.turns) == "abcaba"
