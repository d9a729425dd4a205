"""Count what ranks hold beside weights in an evaluation, for their devices to have that free."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Layout
from .box import Box
from .cost import Costs, branches_of, forwards_of
from .figures import Whole
from .job import Job

FRAGMENTS = 1 << 29  # bytes that an allocator has no use for, and communicators
NOWHERE = Box(name="", devices=(), levels=(), host_bytes_per_s=0.0, hop_s=0.0)


def beside_bytes(whole: Whole, layout: Layout, branches: int, batch: int, speeds: Sequence[int] = ()) -> int:
    """Return the bytes of the rank with the most. ``whole``: of one branch and image; ``speeds`` of
    the ranks, as a placement has them.
    """
    job, own = Job(whole=whole, branches=branches, batch=batch), tuple(speeds)
    widths = layout.widths if whole.attended else layout.widths[:1]
    joined = layout.joined(branches_of(job, layout, own, widths).width)
    # Groups of sharded weights stay apart
    ways = [Costs(job=job, layout=one, box=NOWHERE, speeds=own) for one in (layout, joined)]
    return FRAGMENTS + max(
        costs.activation_bytes(stage, of)
        for costs in ways
        for stage in costs.stages
        for of in forwards_of(costs)
    )
