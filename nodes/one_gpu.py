"""Predict what one GPU would take for a run of a pool, where it was not timed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ..launcher.pool.devices import Placement
from ..parallel_runtime.client.remote_pool import RemotePool
from ..parallel_runtime.client.run import Evaluation, Run
from .planning import PlannedLayout
from .status.sums import achieved_s


def predicted(pools: Mapping[Placement, RemotePool], planned: PlannedLayout | None, run: Run) -> float | None:
    """Return how many times as long one device would take for a run of these pools: by what each
    rank computed, else by what the planner predicted for one device. None where neither is known.
    """
    for placement, pool in list(pools.items()):
        if any(one is run for one in list(pool.runs.recent)):
            computed = pool.runs.once(run, "computed", partial(computed_alone, run, placement))
            if computed is not None:
                return computed
            return pool.runs.once(run, "foretold", partial(foretold, planned, run))
    return None


def computed_alone(run: Run, placement: Placement) -> float | None:
    return times_as_long(list(run.evaluations), placement)


def times_as_long(evaluations: Sequence[Evaluation], placement: Placement) -> float | None:
    """Return how many times as long one device would take: it would compute all that the ranks
    did, and send nothing. None where that is not known: NCCL's messages run beside the clock that
    ranks look at.

    Ranks that share a device share its time, and what ranks on slower devices computed would take
    less time on the first rank's. The first evaluation is left out where others follow, because it
    waits for what is loaded. The sampler's own time stays what it is.
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


def foretold(planned: PlannedLayout | None, run: Run) -> float | None:
    """Return how many times as long as this run one device would take, by what was predicted of it
    when the layout was chosen. None where nothing was.
    """
    if planned is None or planned.alone_s is None:
        return None
    achieved = achieved_s(run, planned.layout)
    return planned.alone_s / achieved if achieved else None
