"""Measure PipeFusion over two stages against the schedule of an ideal pipeline, how busy the stages
are, the bytes it sends, and the gain of letting patches run ahead.

Runs of the stock sampler through the product's own pool are compared with the same patches in turn
in one process. A free-running run is timed whole. Of the others only the first steps are timed:
every step of theirs takes as long as the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.families.sample import Sample, Size
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.occupancy import busy_shares
from .figures import CaseFigures, Figure, Goal, Options, Round, Where, of_phase, ratio, typical
from .lockstep import Phase, Ranks, merge, run, timed
from .pools import cpu_pool
from .schedule import CAUSES, held_to_schedule, submissions

STAGES = 2
PATCHES = (2, 4)
TOKENS = 1024
STEPS, WARM_UP = 28, 1
TIMED_STEPS = 8
OF_SCHEDULE = {"free": 0.95, "single": None}
BUSY = 0.95  # of what the pipeline's filling and draining leaves
WEIGHTS_SLACK = 0.05
patch_tax = ratio("alone", "stock")


class Length(NamedTuple):
    """Of a run. ``timed`` of its ``steps`` are where every step waits for all of the one before:
    the rest are like those after the first.
    """

    tokens: int = TOKENS
    steps: int = STEPS
    timed: int = TIMED_STEPS


LEAST = Length(256, 4, 3)


def speedup(mode: str) -> Callable[[Sequence[Round]], float]:
    return ratio("stock", mode)


def formula_bytes(patches: int, tokens: int, hidden: int, item_bytes: int, batch: int = 1) -> float:
    """Bytes over a boundary between stages in one evaluation: every token once, and one token of
    text for each patch but the first.
    """
    return batch * (tokens + patches - 1) * hidden * item_bytes


def ideal_occupancy(patches: int, steps: int = STEPS) -> float:
    """The share of a run that a stage of an ideal pipeline is busy: it fills and drains once."""
    submissions = patches * (steps - WARM_UP)
    return submissions / (submissions + STAGES - 1)


def pool_of_stages(where: Where, devices: str = "cpu", **known: Any) -> tuple[Any, Any]:
    """The product's own pool, not started yet: its handle and the client's side of it. ``known``:
    more of its setup.
    """
    from ...parallel_runtime.client.remote_pool import RemotePool

    handle = cpu_pool(where, Layout(pipefusion=STAGES), devices, **known)
    return handle, RemotePool(handle)


class Pipeline:
    """The bench's model through a pool of stages: ``free`` is sampled free-running, ``single`` in a
    single timeline. ``modes`` collects how runs were sampled.
    """

    def __init__(self, where: Where, size: Size, patches: int, *devices: str, **known: Any):
        from comfy.patcher_extension import WrappersMP

        from ...parallel_runtime.client.remote_patcher import Patching, parallelize
        from .forwards import SAMPLE

        self.handle, self.pool = pool_of_stages(where, *devices, **known)
        self.modes: list[str] = []
        self.free = parallelize(
            SAMPLE.form.random_model(size), self.pool, 0.0, Patching(patches, WARM_UP), self.modes.append
        )
        self.single = self.free.clone()
        self.single.add_wrapper_with_key(
            WrappersMP.PREDICT_NOISE, "bench", lambda executor, *args, **kwargs: executor(*args, **kwargs)
        )


class PipelineRuns:
    """One process of the bench: the sampler over the model whole, over its patches in turn, and, in
    the first process, over a pipeline.
    """

    def __init__(self, ranks: Ranks, patches: int, length: Length, *devices: str, **known: Any):
        from ..in_process import reference
        from .forwards import SAMPLE, SIZE, SMALL

        self.length, self.size = length, ranks.choose(SIZE, SMALL)
        self.stock = SAMPLE.form.random_model(self.size)
        self.in_turn = reference(SAMPLE.form.random_model(self.size), patches, WARM_UP)
        self.all_cores = ranks.all_cores
        first = ranks.rank == 0
        self.pipeline = Pipeline(ranks, self.size, patches, *devices, **known) if first else None

    def sample(self, model: Any, steps: int, after_step: Callable[..., None] | None = None) -> Any:
        from .forwards import sampled

        return sampled(model, self.length.tokens, steps, callback=after_step)

    def step_by_step(self, model: Any) -> float:
        """Estimate the seconds of a run from its first steps: in one process and in a single
        timeline each step takes as long as the one before, once the warm-up is over.
        """
        ends: list[float] = []
        steps = min(self.length.steps, self.length.timed)
        seconds = timed(lambda: self.sample(model, steps, lambda *_: ends.append(time.perf_counter())))
        return seconds + (self.length.steps - steps) * (ends[-1] - ends[0]) / (steps - 1)

    def through(self, mode: str, seen: dict[str, list]) -> float:
        """Seconds of a run through the pipeline; 0 in the processes that have none."""
        from .forwards import on_cores

        if self.pipeline is None:
            return 0.0
        free, single = self.pipeline.free, self.pipeline.single
        with on_cores(self.all_cores):
            seconds = (
                timed(lambda: self.sample(free, self.length.steps))
                if mode == "free"
                else self.step_by_step(single)
            )
        assert self.pipeline.modes.pop().startswith(mode), "sampled in another mode"
        seen[mode].append(list(self.pipeline.pool.runs.last.evaluations))
        return seconds


def draw(folder: str, case: str, seen: dict[str, list]) -> None:
    """Draw when each stage was at work in the last run of each mode."""
    from .run_picture import draw_run

    for mode, runs in seen.items():
        picture = draw_run([f"stage {stage}" for stage in range(STAGES)], runs[-1])
        assert picture is not None, "the run has no evaluations"
        picture.save(Path(folder, f"pipefusion-{mode}-{case}.png"))


def measure(
    ranks: Ranks, patches: int, rounds: int, length: Sequence[int], pictures: str | None = None
) -> dict[str, Any]:
    runs = PipelineRuns(ranks, patches, Length(*length))
    seen: dict[str, list] = {"free": [], "single": []}
    try:
        phases = {
            "stock": Phase(lambda: runs.step_by_step(runs.stock), alone=True),
            "alone": Phase(lambda: runs.step_by_step(runs.in_turn), alone=True),
            "free": Phase(lambda: runs.through("free", seen)),
            "single": Phase(lambda: runs.through("single", seen)),
        }
        result: dict[str, Any] = {"rounds": ranks.measure(phases, rounds)}
        if runs.pipeline is not None:
            result |= {
                mode: [figures_of(run, mode) for run in all_runs[-rounds:]] for mode, all_runs in seen.items()
            }
            result |= weights(runs.stock.model.diffusion_model, runs.pipeline.pool)
            if pictures:
                draw(pictures, f"m{patches}", seen)
            result["formula"] = formula_bytes(patches, runs.length.tokens, runs.size.hidden, 4)
        return result
    finally:
        if runs.pipeline is not None:
            runs.pipeline.handle.close()


def figures_of(evaluations: Sequence[Any], mode: str) -> dict[str, float]:
    """Figures of one run through the pool. But for the schedule they leave its warm-up out: the
    shares and times are those of the stage that is idle most.
    """
    held = held_to_schedule(submissions(evaluations), one_timeline=mode == "single")
    assert held is not None, "the run has no evaluations"
    patched = [one for one in evaluations if one.part.patch is not None]
    spans = list(zip(*(one.spans.values() for one in patched), strict=True))
    first = [one.part.patch[0] == 0 for one in patched]
    idle_s = [
        sum(max(0.0, after.came_in_s - before.ended_s) for before, after in pairwise(stage))
        for stage in spans
    ]
    by_evaluation = [
        list(group) for _, group in groupby(enumerate(patched), key=lambda item: sum(first[: item[0] + 1]))
    ]
    return {
        "of_schedule": held.share,
        **{
            lost(cause): 1e3 * seconds / (len(evaluations) - len(patched) + sum(first))
            for cause, seconds in held.lost_s.items()
        },
        "occupancy": min(busy_shares([one.spans for one in patched])),
        "bubble_ms": 1e3 * max(idle_s) / max(1, sum(first) - 1),
        "sent_bytes": median(sum(one.sent_bytes for _, one in group) for group in by_evaluation),
    }


def lost(cause: str) -> str:
    """Return the name of the figure of the milliseconds that an evaluation lost to a cause."""
    return f"lost_{cause.replace('-', '_')}_ms"


def weights(model: Any, pool: Any) -> dict[str, float]:
    """The share of the model's weights that the fuller stage holds, and the share that lies outside
    the blocks.
    """
    from ...parallel_runtime.families import plan_for
    from ...parallel_runtime.methods.blocks import blocks_of

    plan = plan_for(type(model))
    assert plan is not None, "the bench's models have plans"
    whole, in_blocks = (
        sum(tensor.nbytes for part in parts for tensor in part.parameters())
        for parts in ([model], [container[place] for container, place, _ in blocks_of(model, plan)])
    )
    held = [memory.model for memory in pool.sessions.live.pool.memory]
    models = len(pool.sessions.live.models)
    return {"weights_share": max(held) / models / whole, "ends_share": 1 - in_blocks / whole}


def weights_of(
    where: Where, sample_of: Sample, size: Size, steps: int, stages: tuple[int, ...] = ()
) -> dict[str, float]:
    """``weights`` after two runs in stages. They are cut as given, or the second time by the block
    times that the first run measured.
    """
    from ...parallel_runtime.client.remote_patcher import Patching, parallelize
    from ..commands.parity import Case, sample

    handle, pool = pool_of_stages(where)
    try:
        model = sample_of.form.random_model(size)
        case = Case(sample_of.name, "pipefusion", "even", size.heads, 1.0, False, "euler")
        parallel = parallelize(model, pool, 0.0, Patching(STAGES, WARM_UP, stages))
        for _ in range(2):
            sample(parallel, case, steps=steps)
        return weights(model.model.diffusion_model, pool)
    finally:
        handle.close()


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import SAMPLE, SIZE, SMALL

    length, cuts = options.choose((Length(), PATCHES), (LEAST, PATCHES[:1]))
    for patches in cuts:
        asked = {"patches": patches, "rounds": options.rounds, "length": length}
        asked["pictures"] = options.pictures and str(options.pictures)
        by_rank = run(options, 2, "pipefusion:measure", **asked)
        yield from figures(f"m{patches}_{length.tokens}", patches, length.steps, by_rank)
    # Blocks that are all of one kind: stages that are equally fast are equally large
    sample, equal = sample_with("equal")
    equal = options.choose(equal, replace(equal, heads=2, blocks=(6,)))
    yield weights_share("equal_blocks", weights_of(options, sample, equal, length.steps))
    # Between its containers: one stage has the blocks of the first, the other twice as many that
    # are less than half as large
    size = options.choose(SIZE, SMALL)
    yield weights_share("cut_by_hand", weights_of(options, SAMPLE, size, length.steps, size.blocks))


def figures(case: str, patches: int, steps: int, by_rank: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    rounds, seen = merge([rank["rounds"] for rank in by_rank]), by_rank[0]
    formula = seen["formula"]
    for mode, goal in OF_SCHEDULE.items():
        made = CaseFigures("pipefusion", f"{mode}_{case}", seen[mode])
        kept = Goal(at_least=goal) if goal else None
        yield made.estimated("of_schedule", of_phase("of_schedule"), "ratio", kept)
        for metric in map(lost, CAUSES):
            yield made.estimated(metric, of_phase(metric), "ms")
        yield replace(made, samples=rounds).estimated("speedup", speedup(mode), "x")
        ideal = Goal(at_least=BUSY * ideal_occupancy(patches, steps)) if mode == "free" else None
        yield made.estimated("occupancy", of_phase("occupancy"), "ratio", ideal)
        yield made.estimated("bubble_ms", of_phase("bubble_ms"), "ms")
        sent = typical(seen[mode], "sent_bytes")
        yield made.counted("bytes_per_step", sent, "bytes", Goal.within(0.02, formula))
        yield made.counted("bytes_formula", formula, "bytes")
    yield CaseFigures("pipefusion", case, rounds).estimated("patch_tax", patch_tax, "ratio")
    yield weights_share(case, seen)


def weights_share(case: str, seen: dict[str, Any]) -> Figure:
    goal = Goal(at_most=1 / STAGES + seen["ends_share"] + WEIGHTS_SLACK)
    return CaseFigures("pipefusion", case).counted("weights_share", seen["weights_share"], "ratio", goal)
