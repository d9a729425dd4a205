"""Blocks shared out over stages: pure arithmetic, by property."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.planner.balance import best_sizes
from pipemesh.parallel_runtime.stages import Stage, cut, share_out, slowest

COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9)


@settings(deadline=None)
@given(COSTS, st.integers(1, 5))
def test_no_other_way_to_share_blocks_out_has_a_faster_slowest_stage(costs, stages):
    if stages > len(costs):
        with pytest.raises(
            LayoutError,
            match=f"pipefusion {stages}, and the model has {len(costs)} blocks?: lower the degree",
        ):
            share_out(costs, stages)
        return
    made = share_out(costs, stages)
    assert [made[0].first, made[-1].end] == [0, len(costs)] and all(
        one.end == other.first for one, other in pairwise(made)
    )
    assert all(stage.end > stage.first for stage in made) and len(made) == stages
    ways = combinations(range(1, len(costs)), stages - 1)
    best = min(
        slowest(costs, [Stage(*ends, len(costs)) for ends in pairwise((0, *way, len(costs)))]) for way in ways
    )
    assert slowest(costs, made) == best


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 30))
def test_stages_cut_by_hand_have_all_blocks_of_the_model_or_are_refused(sizes, blocks):
    if sum(sizes) != blocks:
        with pytest.raises(LayoutError, match=f"share out {sum(sizes)} blocks, and the model has {blocks}:"):
            cut(sizes, blocks)
        return
    made = cut(sizes, blocks)
    assert [stage.size for stage in made] == sizes and made[0].is_first and made[-1].is_last
    assert [[stage.holds(block) for stage in made].count(True) for block in range(blocks)] == [1] * blocks


def test_blocks_of_two_kinds_are_shared_out_by_what_they_cost():
    assert [stage.end for stage in share_out([2.0] * 19 + [1.0] * 38, 2)] == [19, 57]
    assert [stage.end for stage in share_out([1.0] * 57, 2)] == [28, 57]


def test_blocks_are_cut_anew_where_the_slowest_stage_gains_and_not_where_it_is_as_good():
    assert best_sizes([1.0, 1.0, 1.0, 1.01], 2) == ()
    assert best_sizes([3.0, 1.0, 1.0, 1.0], 2) == (1, 3)
