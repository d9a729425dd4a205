"""Predict what one device would take for a run, from what each rank computed of it."""

from __future__ import annotations

from collections.abc import Sequence

from ...launcher.pool.devices import Placement
from ...parallel_runtime.client.run import Evaluation


def times_as_long(evaluations: Sequence[Evaluation], placement: Placement) -> float | None:
    """Return how many times as long one device would take: it would compute all that the ranks
    did, and send nothing. None where that is not known: NCCL's messages run beside the clock that
    ranks look at.

    Ranks that share a device share its time, and those on slower ones than the first rank's would
    take less there. The first evaluation is left out where others follow:
    it waits for what is loaded. So is the sampler's own time, which stays what it is.
    """
    layout = placement.layout
    if placement.backend == "nccl" and layout.group_size > 1:
        return None
    timed = evaluations[1:] if len(evaluations) > 1 and evaluations[0].part is None else evaluations
    if not any(one.spans for one in timed):
        return None
    sharers = {rank: placement.devices.count(device) for rank, device in enumerate(placement.devices)}
    speeds = placement.speeds or (1,) * len(sharers)
    computed_s = sum(
        span.busy_s / sharers[rank] * speeds[rank] / speeds[0]
        for one in timed
        for rank, span in one.spans.items()
    )
    began, at_work_s, until = min(one.began for one in timed), 0.0, 0.0
    for one in sorted(timed, key=lambda one: one.began):
        ended = one.began + one.seconds
        at_work_s += max(0.0, ended - max(one.began, until))
        until = max(until, ended)
    return (until - began - at_work_s + computed_s) / (until - began)
