"""What the pack makes of the axis ``echo``, which it has only in the copy that test_axes.py runs
these tests in.
"""

from functools import partial

import pytest
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.pool import pool_nodes
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.status.reasons import why_layout
from pipemesh.parallel_runtime.layout import Layout, layouts_of

from ..nodes.test_pool_node import validated
from .bounds import assert_same
from .fake_pools import fake_setup
from .in_groups import in_groups
from .models import run

ECHO = {"echo": 2}
LAYOUT = Layout(**ECHO)
BY_HAND = {"devices": "cpu", "layout": "by hand", "ulysses": 1}


def test_a_layout_counts_and_numbers_its_ranks():
    assert (LAYOUT.world_size, LAYOUT.groups, LAYOUT.equation()) == (2, 2, "echo 2 = 2 ranks")
    assert [LAYOUT.coordinates(rank)["echo"] for rank in range(2)] == [0, 1]
    assert LAYOUT.group("echo", 1) == (0, 1) and LAYOUT.lines("echo") == [(0, 1)]
    assert LAYOUT in layouts_of(2) and LAYOUT in Layout(ulysses=1).nearest(2, most=6)
    assert LAYOUT.joined(2) == Layout(ulysses=2)


@pytest.fixture
def node():
    """PipeMesh Pool."""
    runtime = Runtime(fake_setup())
    return pool_nodes(lambda: runtime)[0]


def test_the_pool_node_has_it_as_an_input_and_checks_its_range(node):
    inputs = {one.id: one for one in node.GET_SCHEMA().inputs}
    assert "echo" in inputs
    assert inputs["echo"].display_name == "echo (echo)"
    assert inputs["echo"].tooltip == "How many groups say the same."
    assert validated(node, **BY_HAND, **ECHO) is True
    assert validated(node, **BY_HAND, echo=33) == "echo 33 is out of range: choose 1 to 32."
    listed = validated(node, **{**BY_HAND, "devices": "cpu,cpu,cpu"}, **ECHO)
    assert listed.startswith("echo 2 = 2 ranks, 3 devices listed")


def test_the_grid_the_report_and_the_pictures_know_it():
    assert LAYOUT.grid(["cpu", "cpu"]) == "echo 0:   0 cpu\necho 1:   1 cpu"
    (cause,) = why_layout(LAYOUT)
    assert cause.english == "2 groups of workers compute what one would."


def test_its_ranks_compute_what_stock_does():
    ours, pool = in_groups(LAYOUT, stock_model(5))
    assert_same(partial(run, cfg=4.0), ours, stock_model(5))
    assert {ranks for ranks, _rows, _tokens in pool.asked} >= {(0,), (1,)}
