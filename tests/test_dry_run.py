"""Every released model that a family names runs on every method, without a GPU: no rank mixes
devices or waits for them, and each sends, computes and holds what the formulas say.
"""

import argparse
import json
import os
import subprocess
import sys

import pytest
from pipemesh.launcher.commands import dryrun
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner import expected
from pipemesh.parallel_runtime.planner.figures import Attended

from .conftest import ALL, ROOT

ATTENDED = Attended(tokens=4608, heads=24, head_dim=128)


@pytest.fixture(scope="module")
def records():
    """Of the command, in its own process: ComfyUI chooses its attention when it is imported."""
    command = (sys.executable, "-m", "launcher", "dryrun", "--json", "--all" if ALL else "--cover")
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ.copy(), check=False)
    assert ran.returncode in (0, 1), ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_every_rank_runs_and_costs_what_the_formulas_say(records):
    assert {f"{one['model']}, {one['equation']}, rank {one['rank']}: {one['misses']}" for one in records if one["misses"]} == set()


def test_every_method_is_tried(records):
    kinds = {tuple(axis for axis, degree in one["layout"].items() if degree > 1) for one in records}
    assert kinds >= {(), ("ulysses",), ("ring",), ("pipefusion",), ("ulysses", "ring"), ("ulysses", "pipefusion")}


def test_an_evaluation_gathers_what_a_rank_has_not_of_the_weights(records):
    alone = {one["model"]: one for one in records if one["equation"] == Layout().equation()}
    shared = [one for one in records if one.get("weights") == "sharded" and one["layout"]["pipefusion"] == 1]
    assert shared
    for one in shared:
        ranks, whole = Layout(**one["layout"]).world_size, alone[one["model"]]["weight_bytes"]
        assert one["sent_bytes"]["weights"] == pytest.approx((ranks - 1) / ranks * whole, rel=expected.WITHIN)


def test_ranks_of_a_sequence_need_less_than_one_device(records):
    alone = {one["model"]: one for one in records if one["equation"] == Layout().equation()}
    for one in records:
        if one["layout"]["pipefusion"] == 1 and one["layout"]["ulysses"] > 2:
            assert one["peak_bytes"] < alone[one["model"]]["peak_bytes"]


@pytest.mark.parametrize("layout", [layout for size in dryrun.WORLD_SIZES for layout in dryrun.layouts(size)], ids=Layout.equation)
def test_the_uneven_formula_is_the_published_one_where_all_is_even(layout):
    if layout.pipefusion == 1:
        due = expected.even_bytes(layout.ulysses, layout.ring, 4608, 3072, 1, expected.ITEM_BYTES)
        for rank in range(layout.world_size):
            assert expected.sequence_bytes(layout, rank, ATTENDED) == pytest.approx(due)


def test_the_ranks_of_an_uneven_split_send_together_what_even_ones_would():
    layout = Layout(ulysses=7)
    sent = sum(expected.sequence_bytes(layout, rank, ATTENDED) for rank in range(7))
    assert sent == pytest.approx(7 * expected.even_bytes(7, 1, 4608, 3072, 1, expected.ITEM_BYTES), rel=1e-3)


@pytest.mark.parametrize("text", ["ulysses=0", "ulysses", "fast=2", "ring=2,pipefusion=2", "ulysses=two"])
def test_what_is_no_layout_is_refused_with_the_axes(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no layout .*ulysses, ring, pipefusion"):
        dryrun.parsed_layout(text)


@pytest.mark.parametrize("text", ["1024", "1024x", "0x8", "1x2x3x4", "axb"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        dryrun.parsed_size(text)
    assert dryrun.parsed_size("8x16") == (8, 16, 1)
    assert dryrun.parsed_size("8x16x5") == (8, 16, 5)
