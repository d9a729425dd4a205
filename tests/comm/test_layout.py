"""The grid and its splits: pure arithmetic, by property."""

from dataclasses import fields
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import LayoutError
from pipemesh.parallel_runtime.layout import AXES, Layout, Split, clip_ranges, layouts_of
from pipemesh.parallel_runtime.methods.shards import Division


def test_a_grid_prints_its_equation_and_itself():
    assert Layout().equation() == "ulysses 1 = 1 rank"
    assert Layout(pipefusion=2).grid(["cpu"] * 2) == "stage 0:   0 cpu\nstage 1:   1 cpu"
    layout = Layout(ulysses=2, ring=3)
    assert layout.equation() == "ulysses 2 x ring 3 = 6 ranks"
    assert layout.grid() == "ring 0:   0   1\nring 1:   2   3\nring 2:   4   5"
    assert layout.grid(["a", "bb", "a", "a", "bb", "a"]).splitlines()[:2] == [
        "ring 0:   0 a    1 bb",
        "ring 1:   2 a    3 a",
    ]


def test_groups_are_rows_of_the_grid():
    layout = Layout(ulysses=2, pipefusion=2, cfg=2)
    assert layout.equation() == "ulysses 2 x pipefusion 2 x cfg 2 = 8 ranks"
    assert layout.coordinates(6) == {"ulysses": 0, "ring": 0, "pipefusion": 1, "cfg": 1, "data": 0}
    assert layout.group("cfg", 2) == (2, 6)
    assert layout.grid().splitlines()[::3] == ["branch 0 stage 0:   0   1", "branch 1 stage 1:   6   7"]
    assert (
        Layout(cfg=2, data=2).grid()
        == "data 0 branch 0:   0\ndata 0 branch 1:   1\ndata 1 branch 0:   2\ndata 1 branch 1:   3"
    )


def test_the_table_names_the_degrees_and_goes_from_sequences_to_groups_to_the_pool():
    assert [axis.name for axis in AXES] == [degree.name for degree in fields(Layout)]
    order = ["sequence", "group", "pool"]
    assert [axis.within for axis in AXES] == sorted((axis.within for axis in AXES), key=order.index)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_product_of_degrees_is_a_layout_of_so_many_ranks_once(ranks):
    every = [degrees for degrees in product(range(1, ranks + 1), repeat=5) if prod(degrees) == ranks]
    assert sorted(tuple(layout.degrees().values()) for layout in layouts_of(ranks)) == every


LAYOUTS = st.integers(1, 12).flatmap(lambda ranks: st.sampled_from(list(layouts_of(ranks))))


@given(LAYOUTS)
def test_groups_share_out_the_ranks_and_such_as_join_are_one_sequence_with_one_writer(layout):
    for width in layout.widths:
        groups = [layout.members(group, width) for group in range(layout.groups // width)]
        assert [rank for group in groups for rank in group] == list(range(layout.world_size))
        joined = layout.joined(width)
        assert (joined.world_size, joined.groups * width) == (layout.world_size, layout.groups)
        assert joined.pipefusion == layout.pipefusion
        assert joined.ulysses * joined.ring == layout.sequence_size * width
        for number, group in enumerate(groups):
            assert group == joined.members(number) and sum(map(joined.writes, group)) == 1
        assert joined.writes(layout.writer if width == 1 else 0)


@given(LAYOUTS, st.integers(1, 12))
def test_the_nearest_layouts_have_as_many_ranks_and_the_nearest_of_the_same_number_is_itself(layout, ranks):
    nearest = layout.nearest(ranks)
    assert nearest and all(one.world_size == ranks for one in nearest)
    assert layout.nearest(layout.world_size)[0] == layout


@pytest.mark.parametrize("degree", [0, -1])
def test_a_degree_below_one_is_refused(degree):
    with pytest.raises(LayoutError, match=f"^ulysses {degree} is not a degree: choose 1 or more\\.$"):
        Layout(ulysses=degree)


TOTALS, PARTS = st.integers(0, 300), st.integers(1, 40)


@settings(deadline=None)
@given(TOTALS, PARTS)
def test_an_even_split_covers_everything_once_in_order_and_a_rank_carries_its_own_rows_or_one_anchor(
    total, parts
):
    split = Split.even(total, parts)
    places = [*zip(split.starts, split.sizes, strict=True)]
    assert [row for start, size in places for row in range(start, start + size)] == [*range(total)]
    assert (split.total, len(split.sizes)) == (total, parts)
    assert max(split.sizes) - min(split.sizes) <= 1
    assert list(split.sizes) == sorted(split.sizes, reverse=True)
    for part, (start, size) in enumerate(places):
        local = Division({"img": total}, part, parts).local["img"]
        assert local == ((start, size) if size else (0, min(1, total)))  # of nothing there is no anchor


ROWS = st.integers(0, 40)
LISTS = st.lists(st.tuples(ROWS, ROWS, st.sampled_from("abc")), max_size=6)


@settings(deadline=None)
@given(LISTS, ROWS, ROWS, ROWS)
def test_clipped_ranges_name_the_same_tokens_as_before(ranges, start, size, offset):
    """Token by token: what covered row r of the whole covers row r - start + offset of the part, in
    the same order.
    """
    clipped = clip_ranges(ranges, start, size, offset)
    for row in range(start, start + size):
        before = [rest for begin, end, *rest in ranges if begin <= row < end]
        after = [rest for begin, end, *rest in clipped if begin <= row - start + offset < end]
        assert after == before
    assert all(offset <= begin < end <= offset + size for begin, end, _ in clipped)
