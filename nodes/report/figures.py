"""The figures of a pool and of its last run: what the report's text shows and what GET
/pipemesh/report answers with, under the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ...parallel_runtime.client.run import Evaluation, Run, submissions
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.occupancy import busy_shares, waited_most
from ...parallel_runtime.patches import Part
from ...parallel_runtime.planner.choose import Loss, Row
from ...parallel_runtime.schedule import held_to_schedule
from ..notices import Notice
from ..planning import PlannedLayout
from ..timing import Speed


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes on a rank's device; ``model``: held by the rank's models."""

    free: int
    total: int
    model: int


@dataclass(frozen=True)
class RankFigures:
    rank: int
    device: str
    pid: int | None = None
    phase: str = "closed"
    memory: MemoryFigures | None = None


@dataclass(frozen=True)
class InPatches:
    """Figures of a run that was sampled in patches. ``patches`` is 0 where it was all warm-up.
    ``of_schedule``: the time of an ideal pipeline over the run's; ``lost_ms`` between them, of an
    evaluation, by cause. None and empty where the times of stages are not known.
    """

    mode: str
    patches: int
    whole: int
    of_schedule: float | None = None
    lost_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """Figures of one run. None means not known: NCCL's messages run beside the clock that ranks
    look at, and the times of patches overlap. ``exchange_by_axis``: the shares of the run in which
    one rank waited for messages, of the rank that did so most; empty where that is not known.
    ``to_compile``: the title of its MODEL where that was to be compiled.
    """

    began: float
    in_patches: InPatches | None = None
    busy: tuple[float, ...] = ()
    evaluations: int
    step_ms_mean: float
    step_ms_p50: float | None = None
    hop_ms_p50: float | None = None
    exchange_ms_p50: float | None = None
    exchange_share: float | None = None
    exchange_by_axis: Mapping[str, float] = field(default_factory=dict)
    bytes_per_evaluation: int
    to_compile: str = ""


@dataclass(frozen=True)
class KeptWeights:
    """How the ranks keep a model's weights: ``whole``, ``sharded`` or ``offloaded``, and why."""

    model: str
    kept: str
    why: str


@dataclass(frozen=True)
class RingKernels:
    """The kernel of every rank that a ring's attention runs on, as a rule; ``refused``: a sentence
    for each that was found wrong.
    """

    names: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """Figures of one pool. Counts are since it started; ``patches``: sets of weight patches;
    ``weights`` of each model that it holds; ``kernels`` where it has a ring; ``shares``: what
    slower devices take, in a sentence each.
    """

    state: str
    layout: str
    grid: str
    backend: str
    ranks: tuple[RankFigures, ...]
    models: tuple[str, ...] = ()
    loads: int = 0
    patches: int = 0
    conditioning_uploads: int = 0
    weights: tuple[KeptWeights, ...] = ()
    kernels: RingKernels = RingKernels()
    shares: tuple[str, ...] = ()
    last_run: LastRun | None = None


@dataclass(frozen=True)
class Loser:
    """A layout that was not chosen, and why: ``word`` is one of the planner's ``LOST``, ``values``
    go into its text. ``predicted_ms`` is None where it has no room.
    """

    layout: str
    predicted_ms: float | None
    word: str
    values: tuple[str, ...] = ()

    @property
    def english(self) -> str:
        return f"{self.layout}: {Loss(self.word, self.values).english}"


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """Why a run's layout was chosen. ``why``: by which speeds, or why nothing was predicted;
    ``known`` the same in a word, empty where nothing was, and ``box`` the name of the devices.
    ``predicted_ms`` of an evaluation of all prompts and images, ``achieved_ms`` of it, and
    ``alone_ms`` predicted of it on one device; ``speedup`` predicted over one device. ``losers``:
    other layouts, the best first.
    """

    layout: str
    asked: str
    why: str
    known: str = ""
    box: str = ""
    predicted_ms: float | None = None
    achieved_ms: float | None = None
    alone_ms: float | None = None
    speedup: float | None = None
    losers: tuple[Loser, ...] = ()


@dataclass(frozen=True)
class Report:
    """``notices``: the newest first. ``speed`` of the run that began last, and its ``plan`` where
    its layout was chosen for it.
    """

    pools: tuple[PoolFigures, ...]
    notices: tuple[Notice, ...] = ()
    speed: Speed | None = None
    plan: PlanFigures | None = None

    @property
    def not_in_the_pool(self) -> Notice | None:
        """The newest notice of a node on one GPU, where no run in a pool has begun since."""
        newest = next((notice for notice in self.notices if notice.node and notice.one_gpu), None)
        return newest if newest and not (self.latest and self.latest[1].began > newest.at) else None

    @property
    def latest(self) -> tuple[PoolFigures, LastRun] | None:
        """The pool whose run began last, and that run. None before any run."""
        ran = [(pool, pool.last_run) for pool in self.pools if pool.last_run is not None]
        return max(ran, key=lambda one: one[1].began, default=None)


def asked_of(planned: PlannedLayout) -> str:
    """Say what was to be sampled; with stages also how many evaluations are warm-up, and why."""
    warm_up = planned.warm_up
    if planned.layout.stages == 1 or not warm_up.why:
        return planned.asked
    return f"{planned.asked}; the first {warm_up.evaluations} are whole (warm-up): {warm_up.why}"


def plan_figures(planned: PlannedLayout | None, run: Run | None = None) -> PlanFigures | None:
    """Say why a layout was chosen for a run, and how long it took for what was predicted."""
    if planned is None:
        return None
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
        losers=tuple(loser(row, row.loss) for row in rows if row.loss is not None),
    )


def loser(row: Row, loss: Loss) -> Loser:
    return Loser(
        row.layout.product(), in_ms(row.prediction and row.prediction.seconds), loss.word, loss.values
    )


def in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def achieved_s(run: Run, layout: Layout) -> float | None:
    """Return how long an evaluation of all prompts and images took. The groups of a pool compute
    them at once; those of a pipeline overlap, so that only their mean over the run is known.
    """
    timed, branches = list(run.evaluations), max(1, len(run.branches))
    parts = [(one, one.part) for one in timed if one.part is not None]
    if parts:
        return branches * in_patches(run.began_s, run.mode, parts, False, layout.stages).step_ms_mean / 1e3
    if not timed:
        return None
    return median(one.seconds for one in timed) * (1 if layout.groups > 1 else branches)


def foretold(planned: PlannedLayout | None, run: Run) -> float | None:
    """Return how many times as long as this run one device would take, by what was predicted of
    it. None where nothing was.
    """
    figures = plan_figures(planned, run)
    if figures is None or figures.alone_ms is None or not figures.achieved_ms:
        return None
    return figures.alone_ms / figures.achieved_ms


def figures_of(run: Run, title: str, backend: str, stages: int) -> LastRun | None:
    """Sum up a run of the model with this title, in a pool of so many stages. None if it has
    evaluated nothing.
    """
    figures = last_run(run.began_s, run.mode, list(run.evaluations), backend, stages)
    return figures and replace(
        figures, to_compile=title if any(one.compiles for one in list(run.evaluations)) else ""
    )


def last_run(
    began_s: float, mode: str, evaluations: Sequence[Evaluation], backend: str, stages: int = 1
) -> LastRun | None:
    """Sum up a run. None if it has evaluated nothing."""
    if not evaluations:
        return None
    parts = [(one, one.part) for one in evaluations if one.part is not None]
    timed = backend != "nccl"
    return in_patches(began_s, mode, parts, timed, stages) if parts else whole(began_s, evaluations, timed)


def whole(began_s: float, evaluations: Sequence[Evaluation], timed: bool) -> LastRun:
    """Sum up evaluations that follow one another. ``timed``: it is known what exchanges took."""
    step_s = sum(one.seconds for one in evaluations)
    by_axis = exchange_by_axis(evaluations, step_s) if timed else {}
    return LastRun(
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
    began_s: float, mode: str, submitted: Sequence[tuple[Evaluation, Part]], timed: bool, stages: int
) -> LastRun:
    """Sum up what was submitted under pipefusion: patches, and whole evaluations. Patches overlap,
    so the time of an evaluation is a mean over the run.
    """
    cuts = [(part.branch, part.patch) for _, part in submitted if part.patch is not None]
    whole = len(submitted) - len(cuts)
    evaluations = whole + sum(patch[0] == 0 for _branch, patch in cuts)
    by_branch = Counter(branch for branch, _patch in set(cuts))
    run_s = max(one.began + one.seconds for one, _ in submitted) - min(one.began for one, _ in submitted)
    return LastRun(
        began=began_s,
        in_patches=InPatches(
            mode,
            max(by_branch.values(), default=0),
            whole,
            *of_schedule(mode, submitted, evaluations, timed, stages),
        ),
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


def of_schedule(
    mode: str, submitted: Sequence[tuple[Evaluation, Part]], evaluations: int, timed: bool, stages: int
) -> tuple[float | None, dict[str, float]]:
    """Hold a run in patches to its schedule. Ranks that share a stage wait for each other within
    it, which no clock tells from waiting for another stage. Several pipelines have no schedule in
    common.
    """
    run = submissions(one for one, _ in submitted)
    pipelines = {tuple(one.spans) for one, _ in submitted}
    if not timed or not run or any(len(ranks) != stages for ranks in pipelines) or len(pipelines) > 1:
        return None, {}
    held = held_to_schedule(run, one_timeline=mode.startswith("single"))
    assert held is not None
    return held.share, {cause: 1e3 * seconds / evaluations for cause, seconds in held.lost_s.items()}
