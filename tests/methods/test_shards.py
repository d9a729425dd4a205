"""What arguments that count tokens are for the rows of one rank: each row keeps what it had."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.families.catalogue import PLANS
from pipemesh.parallel_runtime.families.plan import Along, Boundary, Ranges
from pipemesh.parallel_runtime.methods.shards import Division, KeysByFrame, Shards, permute_mask

STREAMS = ("txt", "img")


@st.composite
def shards(draw):
    totals = {stream: draw(st.integers(1, 9)) for stream in STREAMS}
    ranks = draw(st.integers(1, 5))
    weights = draw(st.just(()) | st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    return Shards(Division(totals, draw(st.integers(0, ranks - 1)), ranks, weights=tuple(weights)))


def marked(ranges, tokens):
    """(tokens,): the number of the range that each is in."""
    marks = torch.zeros(tokens)
    for begin, end, number in ranges:
        marks[begin:end] = number
    return marks


def local(rows, marks, streams):
    return rows.slice(marks, 0, streams).tolist()


@settings(deadline=None)
@given(
    rows=shards(),
    first=st.integers(0, 20),
    streams=st.sampled_from([STREAMS, ("img",)]),
    open_end=st.booleans(),
)
def test_ranges_over_one_stream_or_several_mark_the_rows_that_they_marked(rows, first, streams, open_end):
    total = sum(rows.all_tokens[stream] for stream in streams)
    first = min(first, total)
    ranges = [(0, first, 1), (first, None if open_end else total, 2)]
    own = rows.ranges(ranges, Ranges(arg="dims", streams=streams))
    assert marked(own, len(local(rows, marked(ranges, total), streams))).tolist() == local(
        rows, marked(ranges, total), streams
    )


@settings(deadline=None)
@given(rows=shards(), first=st.integers(0, 20), streams=st.sampled_from([STREAMS, ("img",)]))
def test_rows_of_a_range_are_cut_with_their_tokens(rows, first, streams):
    total = sum(rows.all_tokens[stream] for stream in streams)
    first, numbers = min(first, total), torch.arange(total)
    ranges = [(0, first, 7), (first, None, numbers[first:], torch.tensor(3))]
    own = rows.ranges(ranges, Ranges(arg="segments", streams=streams, rows=True))
    here = torch.full((len(local(rows, numbers, streams)),), 7)
    for begin, end, entry, *_ in own:
        here[begin:end] = entry
    assert here.tolist() == [7 if number < first else number for number in local(rows, numbers, streams)]


@pytest.mark.parametrize(("knows", "count"), [(False, 4), (True, 3)])
def test_rows_of_a_range_that_the_plan_does_not_know_are_refused(knows, count):
    rows = Shards(Division({"img": 5}, 0, 2))
    with pytest.raises(
        ModelError,
        match=f"segments has {count} rows for a range of 4 tokens: this model cannot be split by its plan",
    ):
        rows.ranges(
            [(0, 1, 0), (1, 5, torch.zeros(count))], Ranges(arg="segments", streams=("img",), rows=knows)
        )


@settings(deadline=None)
@given(rows=shards(), index=st.integers(0, 20), streams=st.sampled_from([STREAMS, ("img",)]))
def test_a_boundary_parts_the_rows_that_it_parted(rows, index, streams):
    before = torch.arange(sum(rows.all_tokens[stream] for stream in streams)) < index
    own = rows.boundary(index, Boundary(arg="index", streams=streams))
    here = local(rows, before, streams)
    assert [row < own for row in range(len(here))] == here


@settings(deadline=None)
@given(rows=shards(), seed=st.integers(0, 99))
def test_attention_gets_the_whole_mask_for_one_that_a_block_makes_of_its_own_rows(rows, seed):
    """It made (B, 1, l) of (B, l) and zeros; no rank has the rows of the others."""
    item = Along(arg="mask", dim=1, streams=("txt",), masks_keys=True)
    given_ = torch.randn(2, rows.all_tokens["txt"], generator=torch.Generator().manual_seed(seed))
    own = rows.along(given_, item)
    made = torch.cat((own, own.new_zeros(2, rows.local["img"][1])), 1).unsqueeze(1)
    whole = rows.key_mask(given_, item, made)
    assert torch.equal(
        whole, torch.cat((given_, given_.new_zeros(2, rows.all_tokens["img"])), 1).unsqueeze(1)
    )
    assert rows.key_mask(given_, item, made) is whole, "it is permuted anew for every block"
    assert permute_mask(whole, rows.division.joint(STREAMS)).shape == whole.shape


def test_a_plan_that_cannot_tell_how_long_its_streams_are_is_refused():
    plan = next(plan for plan in PLANS if plan.blocks[0].lengths)
    with pytest.raises(ValueError, match="must give `lengths` of all but one of the streams in"):
        replace(plan, blocks=(replace(plan.blocks[0], lengths={}), *plan.blocks[1:]))


@settings(deadline=None)
@given(rows=shards(), stream=st.sampled_from(STREAMS), order=st.permutations(STREAMS))
def test_rows_that_left_stand_where_the_model_will_look_for_them(rows, stream, order):
    left = torch.arange(rows.all_tokens[stream]).view(1, -1, 1) + 1
    among = rows.among(left, stream, order)
    begin = 0 if order[0] == stream else rows.all_tokens[order[0]]
    assert among.shape[1] == sum(rows.all_tokens.values()) and among.sum() == left.sum()
    assert torch.equal(among[:, begin : begin + rows.all_tokens[stream]], left)


@settings(deadline=None)
@given(rows=shards(), sliced=st.sampled_from([("txt",), ("img",), STREAMS]), order=st.permutations(STREAMS))
def test_rows_of_a_stream_that_a_model_slices_between_blocks_stand_in_their_own_places(rows, sliced, order):
    local = rows.slice(torch.arange(sum(rows.all_tokens.values())).view(1, -1, 1) + 1, 1, order)
    between = rows.spread(local, order, sliced)
    assert torch.equal(rows.localized(between, order, sliced), local)
    lengths = [rows.all_tokens[stream] if stream in sliced else rows.local[stream][1] for stream in order]
    assert between.shape[1] == sum(lengths)
    for stream, part in zip(order, between.split(lengths, 1), strict=True):
        start, size = rows.local[stream]
        own = part[:, start : start + size] if stream in sliced else part
        assert own.count_nonzero() == part.count_nonzero() == size


@given(
    tokens=st.integers(1, 5), frames=st.integers(1, 5), ends=st.tuples(st.integers(0, 25), st.integers(0, 25))
)
def test_each_row_looks_at_the_keys_of_the_frame_before_its_own(tokens, frames, ends):
    start, end = sorted(min(one, tokens * frames) for one in ends)
    keys = torch.arange(1, frames).repeat_interleave(tokens)  # the number of each key's frame, plus one
    seen = torch.full((end - start,), -1)
    for rows, of_frame in KeysByFrame(keys, keys, "pose", tokens).segments(start, end):
        found = keys[of_frame] if of_frame is not None else torch.zeros(1)
        assert (seen[rows] == -1).all() and (of_frame is None or len(found) == tokens)
        seen[rows] = int(found.unique())
    assert seen.tolist() == [row // tokens for row in range(start, end)]
