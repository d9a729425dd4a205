"""What ranks send each other arrives as it was, with as many kernels for eight ranks as for two."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.bench.forwards import StandinExchange
from pipemesh.parallel_runtime.comm.parts import Parts, counts_of, flags_of, padded, runs_of
from pipemesh.parallel_runtime.comm.traffic import no_wish
from pipemesh.parallel_runtime.layout import Split
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16)


def parts(counts, is_flagged, dtype):
    sizes = padded(counts, is_flagged, dtype)
    buffer = torch.full((sum(sizes),), torch.nan, dtype=dtype)
    return Parts(buffer, sizes, flags_of(buffer, sizes) if is_flagged else [], {})


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=2, max_size=5),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_each_rank_gets_its_heads_of_all_tokens_whatever_the_split(sizes, tensors, dtype, is_flagged):
    heads, tokens = zip(*sizes, strict=True)
    whole = torch.randn(tensors, 2, sum(heads), sum(tokens), 3).to(dtype)
    local = whole.split(tokens, 3)
    sent = [parts(counts_of([runs_of(t, 1, heads) for t in own]), is_flagged, dtype) for own in local]
    for rank, (to, own) in enumerate(zip(sent, local, strict=True)):
        to.put([runs_of(t, 1, heads) for t in own])
        for flags in to.flags:
            flags.fill_(rank)
    for rank, start in enumerate(accumulate(heads[:-1], initial=0)):
        into = torch.full((tensors, 2, heads[rank], sum(tokens), 3), torch.nan, dtype=dtype)
        came = parts(counts_of([runs_of(into, 3, tokens)]), is_flagged, dtype)
        pieces = [to.buffer.split(to.sizes)[rank] for to in sent]
        assert [len(piece) for piece in pieces] == came.sizes
        came.buffer.copy_(torch.cat(pieces))
        came.take(runs_of(into, 3, tokens))
        assert torch.equal(into, whole[:, :, start : start + heads[rank]])
        assert is_flagged == (came.flags != [])
        if is_flagged:
            assert torch.cat(came.flags).tolist() == [*range(len(heads))]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.booleans(), st.sampled_from(DTYPES))
def test_every_part_begins_at_an_aligned_place_and_has_room_for_its_flag(counts, is_flagged, dtype):
    sizes = padded(counts, is_flagged, dtype)
    assert all(start * dtype.itemsize % 128 == 0 for start in accumulate(sizes))
    assert all(
        count + is_flagged <= size < count + is_flagged + 128
        for count, size in zip(counts, sizes, strict=True)
    )


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.count += func._schema.is_mutable or not (
            func.is_view or "empty" in func._opname or "new_" in func._opname
        )
        return made


def kernels_of(ranks, heads, tokens):
    """Of the exchange of q, k and v on the last rank."""
    split = Split.even(heads, ranks)
    q = torch.randn(1, heads, tokens[-1], 4)
    exchange = StandinExchange(ranks - 1, ranks)
    into = torch.empty(3, 1, split.sizes[-1], sum(tokens), 4)
    with Kernels() as kernels:
        exchange.all_to_all(
            [runs_of(t, 1, split.sizes) for t in (q, q, q)], runs_of(into, 3, tokens), no_wish
        )
    return kernels.count - ranks  # the stand-in writes each part's flag


@pytest.mark.parametrize("ranks", [4, 8])
def test_an_exchange_of_any_number_of_ranks_is_the_kernels_of_two_and_twice_that_where_it_is_uneven(ranks):
    of_two = kernels_of(2, 24, [6, 6])
    assert of_two == kernels_of(ranks, 24, [6] * ranks)
    assert of_two < kernels_of(ranks, 25, [7] + [6] * (ranks - 1)) <= 2 * of_two
