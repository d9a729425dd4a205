"""Every released model that a family names runs on every method, without a GPU: no rank mixes
devices or waits for them, and each sends, computes and holds what the formulas say.
"""

import argparse
import json
from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
from pipemesh.lab.commands import dry_table, dryrun
from pipemesh.lab.dry_run import expected
from pipemesh.lab.dry_run.ranks import RankFigures, Watched
from pipemesh.lab.dry_run.released_model import empty_model
from pipemesh.lab.dry_run.rows import Apart, FrameTokens, Unshared, WholeByRows
from pipemesh.parallel_runtime.families.catalogue import FAMILIES, RELEASED, classes_of
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.cost import OF_GRAPH, OF_INPUTS
from pipemesh.parallel_runtime.planner.evaluation_count import Shareable
from pipemesh.parallel_runtime.planner.prediction import sharded_bytes
from pipemesh.tests.fixtures import ALL, ROOT, all_said_by
from pipemesh.tests.kit.planned import attention_alone

ALONE = [("ulysses",), ("ring",), ("pipefusion",)]
AT_MOST = {"ulysses": 1.4, "ring": 2.3}  # kernels of a rank, over those of one GPU: a merge as one


@pytest.fixture(scope="module")
def records(command):
    """Of the command, in its own process: ComfyUI chooses its attention when it is imported."""
    process = command("dryrun", "--json", "--all" if ALL else "--cover")
    said = all_said_by(process)
    assert process.wait() in (0, 1), said
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_every_rank_runs_and_costs_what_the_formulas_say(records):
    assert {
        f"{one['model']}, {one['equation']}, rank {one['rank']}: {one['misses']}"
        for one in records
        if one["misses"]
    } == set()


def methods_of(records):
    return {tuple(axis for axis, degree in one["layout"].items() if degree > 1) for one in records}


def test_every_method_is_tried(records):
    assert methods_of(records) >= {(), *ALONE, *combinations(chain(*ALONE), 2)}


def test_a_rank_launches_at_most_so_many_kernels_and_each_message_is_aligned(records):
    for axis, most in AT_MOST.items():
        own = [one for one in records if "stock_launches" in one and is_alone(one, axis)]
        assert own and {one["own_later_waits"] for one in own} == {0}
        for one in own:
            assert one["merged_in_one"] <= most * one["stock_launches"], (one["model"], one["equation"])
    assert {one["unaligned"] for one in records if "unaligned" in one} == {0}


def test_a_rank_launches_little_more_than_one_gpu(records):
    """As many kernels on four ranks as on eight. Of one model, with ``PIPEMESH_TEST_ALL`` of those
    in the documents.
    """
    shown = [one.name for _, one in RELEASED.values() if one.title]
    for name in shown if ALL else [next(dryrun.cover()).name]:
        own = [one for one in records if one["model"] == name and "stock_launches" in one]
        for axis, most, sizes in (("ulysses", 1.3, {4, 8}), ("ring", 2, {8})):
            ranked = [one for one in own if is_alone(one, axis)]
            assert {one["layout"][axis] for one in ranked} >= sizes, name
            assert all(one["merged_in_one"] <= most * one["stock_launches"] for one in ranked), name
            on_many = {one["merged_in_one"] for one in ranked if one["layout"][axis] > 2}
            assert axis == "ring" or len(on_many) == 1, name


def test_a_rank_launches_what_the_planner_charges(records):
    """With whole weights, of each kind of method; the charge is by attentions alone."""
    covered = {one.name for one in dryrun.cover()}
    whole = [one for one in records if one.get("launches") and one["weights"] == "whole"]
    counted = [one for one in whole if one["model"] in covered]
    assert methods_of(counted) >= {*ALONE}
    for one in counted:
        launches, predicted = one["merged_in_one"], one["predicted_launches"]
        assert abs(predicted - launches) <= 0.05 * launches, (one["model"], one["equation"])


def test_a_replay_of_the_last_rank_has_a_third_of_the_calls_or_says_why_there_is_none(records):
    last = [one for one in records if one.get("launches") and "pieces" in one]
    assert {one["equation"] for one in last} == {one["equation"] for one in records if one.get("launches")}
    for one in last:
        calls = one["graph_launches"] + one["messages"] + sum(one["eager"].values())
        is_recorded = one["weights"] == "whole" and one["layout"]["pipefusion"] == 1
        assert bool(calls) == is_recorded == (not one["unrecorded"]), one["unrecorded"]
        assert 3 * calls < one["merged_in_one"], one["equation"]
        if is_recorded:
            charged = calls - (1 - OF_GRAPH) * one["graph_launches"]
            assert one["predicted_replay"] == pytest.approx(charged, abs=OF_INPUTS), one["equation"]


def is_alone(record, axis):
    return record["layout"][axis] == Layout(**record["layout"]).world_size and record["weights"] == "whole"


def test_an_evaluation_gathers_what_a_rank_has_not_of_the_weights(records):
    """Of all but the tables that stay in the machine's memory, where each layer computes once."""
    alone = {one["model"]: one for one in records if one["equation"] == Layout().equation()}
    shared = [one for one in records if one.get("weights") == "sharded" and one["layout"]["pipefusion"] == 1]
    assert shared
    once = 0
    for one in shared:
        ranks, whole = Layout(**one["layout"]).world_size, alone[one["model"]]
        turns = (ranks - 1) / ranks * whole["turn_bytes"]
        assert one["sent_bytes"]["weights"] == pytest.approx(turns, rel=expected.WITHIN)
        each = whole["weight_bytes"] - whole["table_bytes"]
        once += whole["turn_bytes"] == pytest.approx(each, rel=expected.WITHIN)
    assert once > 0.8 * len(shared)


def test_ranks_of_a_sequence_need_less_than_one_device(records):
    alone = {one["model"]: one for one in records if one["equation"] == Layout().equation()}
    for one in records:
        if one["layout"]["pipefusion"] == 1 and one["layout"]["ulysses"] > 2:
            assert one["peak_bytes"] < alone[one["model"]]["peak_bytes"]


BLOCK = Apart(alone=10, framed=20, behind=5, framed_behind=8)
FRAMED = WholeByRows(
    **vars(replace(attention_alone(0), block_flops=[100] * 4, around_flops=50, attended_by_block=[[]] * 4)),
    unshared=Unshared([BLOCK] * 4, closing=40, frames=FrameTokens(each=10, total=40)),
)


STAGES, BOTH = {"pipefusion": 2}, {"ulysses": 2, "pipefusion": 2}
# Of a stage's blocks: what is shared, of the first and of the second; and what is of whole frames
FIRST, SECOND, FRAMES = 2 * 57, 2 * 57 + 4 * 5, 2 * 20 + 4 * 8


@pytest.mark.parametrize(
    ("degrees", "rank", "stage", "cut", "flops"),
    [
        ({}, 0, (0, 4), (), 400 + 50),
        ({"ulysses": 2}, 1, (0, 4), (), (400 - 4 * 10) / 2 + 50 + 4 * 10),
        # Two patches have tokens of 2 and of 3 frames, of which there are 4
        (STAGES, 0, (0, 2), [(0, 15), (15, 40)], FIRST + 5 + (2 * 20 + 8) * 5 / 4 + (10 + 2 * 10) * 2),
        (STAGES, 1, (2, 4), [(0, 15), (15, 40)], SECOND + FRAMES * 5 / 4 + (50 + 2 * 10) * 2),
        # Each of two ranks has tokens of one frame of a patch; or of two, which both compute
        (BOTH, 2, (2, 4), [(0, 20), (20, 40)], SECOND / 2 + FRAMES / 2 + (50 + 2 * 10) * 2),
        (BOTH, 2, (2, 4), [(5, 25), (25, 40)], SECOND / 2 + FRAMES + (50 + 2 * 10) * 2),
    ],
)
def test_a_rank_computes_whole_frames_and_what_lies_behind_the_blocks_before_its_own(
    degrees, rank, stage, cut, flops
):
    assert expected.flops(FRAMED, Layout(**degrees), rank, stage, cut) == pytest.approx(flops)


def test_weights_that_are_gathered_twice_are_a_miss():
    layout, alone = Layout(ulysses=4), attention_alone(4096)
    alone = replace(alone, weight_bytes=1000, shareable=Shareable([996], 0, 10, 20))
    whole = WholeByRows(**vars(alone), unshared=Unshared([Apart()]))
    sent = expected.sent_bytes(whole, layout, 1)
    held = sharded_bytes(whole, layout, (0, 1))

    def misses(gathered):
        sent_bytes = {"ulysses": sent, "weights": gathered}
        flops = round(expected.flops(whole, layout, 1, (0, 1)))
        none = dict.fromkeys(("peak_bytes", "kept_bytes"), 0) | {"watched": Watched(), "stage": (0, 1)}
        sizes = {"weight_bytes": held, "wired_bytes": sent + gathered, **none}
        figures = RankFigures(rank=1, flops=flops, sent_bytes=sent_bytes, **sizes)
        return expected.misses(whole, layout, figures, is_sharded=True)

    assert misses(747) == []
    assert misses(2 * 747) == ["1494 gathered bytes of weights for 747"]


def test_every_family_has_a_released_model_or_is_left_out_by_name():
    """Each class with ``PIPEMESH_TEST_ALL``: it takes the model."""
    assert [
        family.name
        for family in FAMILIES
        if not any(sample.form.released for sample in family.samples)
        and not {name for plan in family.plans for name in classes_of(plan)} <= set(family.unreleased)
    ] == []
    classes = {name for family in FAMILIES for plan in family.plans for name in classes_of(plan)}
    left_out = {name for family in FAMILIES for name in family.unreleased}
    assert left_out < classes
    if ALL:
        with torch.device("meta"):
            built = [
                empty_model(*one, torch.bfloat16, torch.device("meta")).diffusion_model
                for one in RELEASED.values()
            ]
        assert classes - {f"{type(one).__module__}:{type(one).__qualname__}" for one in built} == left_out


def test_the_documents_table_is_what_the_command_prints(records):
    """The rows of which all ranks ran; all of them with ``PIPEMESH_TEST_ALL``."""
    document = dict(dry_table.written((ROOT / "lab" / "docs" / "CUDA.md").read_text(encoding="utf-8")))
    ours = dry_table.rows(records)
    assert ours and {row: document.get(row) for row in ours} == ours
    if ALL:
        assert set(document) <= set(ours)


@pytest.mark.parametrize("text", ["ulysses=0", "fast=2", "ulysses=two"])
def test_what_is_no_layout_is_refused_with_the_axes(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no layout .*ulysses, ring, pipefusion"):
        dryrun.parsed_layout(text)
