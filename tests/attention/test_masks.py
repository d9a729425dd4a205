"""Attention masks of every form the hosts give, cut for ranks: against brute force, and through
real ranks against stock.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.lab.commands.parity import BOUND, Bench, relative_error
from pipemesh.parallel_runtime.methods.shards import Division, part_of_mask, permute_mask

from ..kit.models import run

HEADS = 5
FORMS = ("LL", "BLL", "B1LL", "BHLL", "B11L")


def make_mask(form, kind, total, batch=2, heads=HEADS, seed=0):
    """Additive masks have a number of their own in every place; ``open`` ones close part of the
    keys, never a token's own.
    """
    shape = [{"B": batch, "H": heads, "L": total, "1": 1}[axis] for axis in form]
    if kind == "numbered":
        return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    open_ = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    open_ |= torch.eye(total, dtype=torch.bool) if shape[-2] == total else torch.arange(total) == 0
    return open_ if kind == "bool" else torch.zeros(shape).masked_fill(~open_, -10000.0)


def everywhere(mask, batch, heads, queries, keys):
    """(B, H, Q, K), as attention understands it."""
    return (mask.unsqueeze(1) if mask.ndim == 3 else mask).expand(batch, heads, queries, keys)


def rank_major(totals, ranks):
    """Position in rank-major order -> position in the host's order: all streams' parts of rank 0,
    then of rank 1, and so on.
    """
    starts = [sum(totals[:index]) for index in range(len(totals))]
    parts = [
        [start + rows for rows in torch.arange(total).tensor_split(ranks)]
        for start, total in zip(starts, totals, strict=True)
    ]
    return torch.cat([stream[rank] for rank in range(ranks) for stream in parts]).tolist()


@settings(deadline=None)
@given(
    totals=st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any),
    ranks=st.integers(1, 5),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(["numbered", "bool"]),
    data=st.data(),
)
def test_a_part_of_a_mask_says_of_every_query_key_and_head_what_the_whole_says(
    totals, ranks, form, kind, data
):
    total, batch = sum(totals), 2

    def cut(size):
        start = data.draw(st.integers(0, size))
        return slice(start, data.draw(st.integers(start, size)))

    rows, columns, heads = cut(total), cut(total), cut(HEADS)
    mask = make_mask(form, kind, total, batch)
    streams = {str(index): size for index, size in enumerate(totals)}
    joint = Division(streams, 0, ranks).joint(tuple(streams))
    part = part_of_mask(permute_mask(mask, joint), rows, columns, heads, total, HEADS)
    order, whole = rank_major(totals, ranks), everywhere(mask, batch, HEADS, total, total)
    here = everywhere(
        part, batch, heads.stop - heads.start, rows.stop - rows.start, columns.stop - columns.start
    )
    for head, h in enumerate(range(HEADS)[heads]):
        for query, q in enumerate(order[rows]):
            for key, k in enumerate(order[columns]):
                assert torch.equal(here[:, head, query, key], whole[:, h, q, k])


# -- through real ranks


@pytest.fixture(scope="module")
def bench(clients):
    return Bench(clients)


def masked(model, mask):
    clone = model.clone()
    clone.set_model_unet_function_wrapper(
        lambda apply_model, options: apply_model(
            options["input"], options["timestep"], **{**options["c"], "attention_mask": mask}
        )
    )
    return run(clone)


TOKENS = 13 + 4 * 5


@pytest.mark.cover(2)
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["ulysses2", "ring2"])
@pytest.mark.parametrize(
    ("form", "kind"), [("B1LL", "bool"), ("BHLL", "additive"), ("BHLL", "bool"), ("B11L", "additive")]
)
def test_masks_of_every_form_are_exact_through_two_ranks(bench, layout, form, kind):
    """The host turns a boolean mask of a prompt into numbers before its model sees it, and so do
    the ranks.
    """
    mask = make_mask(form, kind, TOKENS, batch=1)
    stock = masked(bench.stock(HEADS), mask)
    assert relative_error(stock, run(bench.stock(HEADS))) > 1e-2
    assert relative_error(masked(bench.parallel(HEADS, layout), mask), stock) <= BOUND
