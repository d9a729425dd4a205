"""Sum up a run of a pool, and the plan that was made for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ...parallel_runtime.client.run import Evaluation, Run
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.occupancy import busy_shares, waited_most
from ...parallel_runtime.patches import Part
from ...pool.devices import Placement
from ..planning import PlannedLayout
from .figures import InPatches, Loser, PlanFigures, RunFigures


def asked_of(planned: PlannedLayout) -> str:
    """Say which sampling was planned. If the layout has stages, say also how many evaluations are
    warm-up.
    """
    if planned.layout.stages == 1:
        return planned.asked
    return f"{planned.asked}; the first {planned.warm_up} are whole (warm-up)"


def plan_figures(planned: PlannedLayout, run: Run | None = None) -> PlanFigures:
    """Say why a layout was chosen for a run, and compare the predicted time with the time that the
    run took.
    """
    rows = planned.plan.rows if planned.plan is not None else ()
    return PlanFigures(
        layout=planned.layout.equation(),
        asked=asked_of(planned),
        why=planned.why,
        known=planned.known,
        box=planned.box,
        predicted_ms=in_ms(planned.seconds),
        achieved_ms=in_ms(achieved_s(run, planned.layout)) if run is not None else None,
        alone_ms=in_ms(planned.alone_s),
        speedup=planned.speedup,
        losers=tuple(
            Loser(row.layout.product(), in_ms(row.prediction and row.prediction.seconds), row.loss)
            for row in rows
            if row.loss is not None
        ),
    )


def in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def achieved_s(run: Run, layout: Layout) -> float | None:
    """Return how long an evaluation of all prompts and images took. The groups of a pool compute
    them at once; those of a pipeline overlap, so that only their mean over the run is known.
    """
    timed, branches = list(run.evaluations), max(1, len(run.names.branches))
    parts = [(one, one.part) for one in timed if one.part is not None]
    if parts:
        return branches * in_patches(run.began_s, run.mode, parts, False).step_ms_mean / 1e3
    if not timed:
        return None
    return median(one.seconds for one in timed) * (1 if layout.groups > 1 else branches)


def longer_alone(run: Run, placement: Placement, planned: PlannedLayout | None) -> float | None:
    """Return how many times as long as this run one device would take: from the computing time of
    each rank, else from the prediction when the layout was chosen. None if neither is known.
    """
    computed = times_as_long(list(run.evaluations), placement)
    if computed is not None or planned is None or planned.alone_s is None:
        return computed
    achieved = achieved_s(run, planned.layout)
    return planned.alone_s / achieved if achieved else None


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


def run_figures(run: Run, title: str, backend: str) -> RunFigures | None:
    """Sum up a run of the model with this title. None if it has evaluated nothing."""
    evaluations = list(run.evaluations)
    if not evaluations:
        return None
    parts = [(one, one.part) for one in evaluations if one.part is not None]
    timed = backend != "nccl"
    figures = (
        in_patches(run.began_s, run.mode, parts, timed) if parts else whole(run.began_s, evaluations, timed)
    )
    return replace(figures, to_compile=title) if any(one.compiles for one in evaluations) else figures


def whole(began_s: float, evaluations: Sequence[Evaluation], timed: bool) -> RunFigures:
    """Sum up evaluations that follow one another. ``timed``: it is known what exchanges took."""
    step_s = sum(one.seconds for one in evaluations)
    by_axis = exchange_by_axis(evaluations, step_s) if timed else {}
    return RunFigures(
        began=began_s,
        evaluations=len(evaluations),
        step_ms_mean=1e3 * step_s / len(evaluations),
        step_ms_p50=1e3 * median(one.seconds for one in evaluations),
        hop_ms_p50=1e3 * median(one.hop_s for one in evaluations),
        exchange_ms_p50=1e3 * median(one.exchange_s for one in evaluations) if timed else None,
        exchange_share=sum(by_axis.values()) if timed else None,
        exchange_by_axis=by_axis,
        bytes_per_evaluation=max(one.sent_bytes for one in evaluations),
    )


def in_patches(
    began_s: float, mode: str, submitted: Sequence[tuple[Evaluation, Part]], timed: bool
) -> RunFigures:
    """Sum up the patches and the whole evaluations that were submitted under PipeFusion. Patches
    overlap, so the time of an evaluation is a mean over the run.
    """
    cuts = [(part.branch, part.patch) for _, part in submitted if part.patch is not None]
    whole = len(submitted) - len(cuts)
    evaluations = whole + sum(patch[0] == 0 for _branch, patch in cuts)
    by_branch = Counter(branch for branch, _patch in set(cuts))
    run_s = max(one.began + one.seconds for one, _ in submitted) - min(one.began for one, _ in submitted)
    return RunFigures(
        began=began_s,
        in_patches=InPatches(mode, max(by_branch.values(), default=0), whole),
        busy=tuple(busy_shares([one.spans for one, part in submitted if part.patch is not None]))
        if timed
        else (),
        evaluations=evaluations,
        step_ms_mean=1e3 * run_s / evaluations,
        exchange_by_axis=exchange_by_axis([one for one, _ in submitted], run_s) if timed else {},
        bytes_per_evaluation=round(sum(one.sent_bytes for one, _ in submitted) / evaluations),
    )


def exchange_by_axis(evaluations: Sequence[Evaluation], run_s: float) -> dict[str, float]:
    """Return the shares of a run for which the rank that waited most for messages did so."""
    return {axis: seconds / run_s for axis, seconds in waited_most(one.spans for one in evaluations).items()}
