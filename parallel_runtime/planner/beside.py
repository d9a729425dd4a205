"""Count what ranks hold beside weights in an evaluation, for their devices to have that free."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Layout
from .box import Box
from .cost import Costs, forwards_of
from .figures import Whole
from .job import Job

FRAGMENTS = 1 << 29  # bytes that an allocator has no use for, and communicators
NOWHERE = Box(name="", devices=(), levels=(), host_bytes_per_s=0.0, hop_s=0.0)


def beside_bytes(whole: Whole, layout: Layout, branches: int, batch: int, speeds: Sequence[int] = ()) -> int:
    """Return the bytes of the rank with the most. ``whole``: of one branch and image; ``speeds`` of
    the ranks, as a placement has them.
    """
    costs = Costs(job=Job(whole=whole, branches=branches, batch=batch), layout=layout, box=NOWHERE, speeds=tuple(speeds))
    return FRAGMENTS + max(costs.activation_bytes(stage, own) for stage in costs.stages for own in forwards_of(costs))
