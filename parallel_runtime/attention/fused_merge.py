"""``merge_partials`` as one kernel of Triton's. A program has some rows, each of one query."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .merging import Partial

ROWS = 16  # of a program


def fused(first: Partial, second: Partial) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, level, weight), as ``merge_partials`` computes them."""
    _, heads, queries, dim = first.out.shape
    level, weight = (first.out.new_empty(first.out.shape[:3], dtype=torch.float32) for _ in range(2))
    a, b = (part.out if part.out.stride(-1) == 1 else part.out.contiguous() for part in (first, second))
    made = torch.empty_like(a, dtype=torch.float32)
    count = level.numel()
    if made.numel():
        launch: Any = merge_rows[(triton.cdiv(count, ROWS),)]
        launch(
            *(a, first.lse.contiguous(), weight if first.weight is None else first.weight.contiguous()),
            *(b, second.lse.contiguous(), weight if second.weight is None else second.weight.contiguous()),
            *(made, level, weight),
            *(first.keys, math.log(first.keys), second.keys, math.log(second.keys)),
            *(count, queries, heads),
            *(*a.stride()[:3], *b.stride()[:3], *made.stride()[:3]),
            A_IS_MERGED=first.weight is not None,
            B_IS_MERGED=second.weight is not None,
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim),
            ROWS=ROWS,
        )
    return made, level, weight


@triton.jit
def merge_rows(
    a,
    a_lse,
    a_weight,
    b,
    b_lse,
    b_weight,
    made,
    made_level,
    made_weight,
    a_keys,
    a_log,
    b_keys,
    b_log,
    count,
    queries,
    heads,
    a_batch,
    a_head,
    a_query,
    b_batch,
    b_head,
    b_query,
    made_batch,
    made_head,
    made_query,
    A_IS_MERGED: tl.constexpr,
    B_IS_MERGED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    x = tl.load(a_lse + row, mask=is_row, other=0.0) - a_log
    y = tl.load(b_lse + row, mask=is_row, other=0.0) - b_log
    level = tl.maximum(x, y)
    units = tl.where(level == float("-inf"), 0.0, level)
    x = tl.exp(x - units) * (tl.load(a_weight + row, mask=is_row, other=1.0) if A_IS_MERGED else a_keys)
    y = tl.exp(y - units) * (tl.load(b_weight + row, mask=is_row, other=1.0) if B_IS_MERGED else b_keys)
    weight = tl.where(level == float("-inf"), 1.0, x + y)
    tl.store(made_level + row, level, mask=is_row)
    tl.store(made_weight + row, weight, mask=is_row)
    query = (row % queries).to(tl.int64)[:, None]
    head = (row // queries % heads).to(tl.int64)[:, None]
    batch = (row // queries // heads).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    is_there = is_row[:, None] & (column < DIM)
    a_at = a + batch * a_batch + head * a_head + query * a_query + column
    b_at = b + batch * b_batch + head * b_head + query * b_query + column
    made_at = made + batch * made_batch + head * made_head + query * made_query + column
    a_out = tl.load(a_at, mask=is_there, other=0.0).to(tl.float32) * (x / weight)[:, None]
    b_out = tl.load(b_at, mask=is_there, other=0.0).to(tl.float32) * (y / weight)[:, None]
    tl.store(made_at, a_out + b_out, mask=is_there)
