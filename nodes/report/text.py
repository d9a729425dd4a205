"""The text of PipeMesh Report, from figures. Columns line up in a monospaced font."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...parallel_runtime.client.queue_lookahead import Images
from ...parallel_runtime.texts import Text
from ...parallel_runtime.wire.segment import mib
from ...pool.devices import Placement
from ..notices import Notice
from ..prompt_times import PromptFigures
from ..runtime import Runtime
from ..settings import Choice
from ..status.collection import pool_status, run_status
from ..status.figures import (
    InPatches,
    Loser,
    PlanFigures,
    PoolStatus,
    QueueFigures,
    RankFigures,
    RingKernels,
    RunFigures,
    RunStatus,
)
from ..status.reasons import WAITED_FOR
from ..timing import Speed

NOTHING = Images()
LONG = 20  # a value, such as a list
SHOWN = 6  # layouts that were not chosen
WORKS = {"decode": "VAE, decode", "encode": "VAE, encode", "upscale": "upscale model"}
NO_POOL = (
    "Nothing has been sampled by a pool yet: switch auto mode on in ComfyUI's settings, under PipeMesh, or"
    " put PipeMesh Parallelize before the sampler; connect the sampler's LATENT to this node and run."
)


def text_of(runtime: Runtime, only: Choice | None) -> str:
    """Report the run that began last, in any pool or in ``only`` one."""
    pools, last = [pool_status(*one) for one in runtime.pools(only)], runtime.last_run(only)
    run = run_status(runtime, *last) if last is not None else None
    return report_text(
        pools, run, runtime.notices.latest(), only and only.placement, runtime.planning.ahead.images
    )


def report_text(
    pools: Sequence[PoolStatus],
    run: RunStatus | None,
    notices: Sequence[Notice] = (),
    asked: Placement | None = None,
    ahead: Images = NOTHING,
) -> str:
    """Describe the ``run`` that began last, of one of these pools. Without one, say how to get a
    report of the pool ``asked`` for. ``notices``: the newest first. ``ahead``: what was
    sampled ahead so far.
    """
    alone = [
        one
        for one in notices
        if one.node and one.one_gpu and (run is None or run.began <= one.at or one.stays)
    ]
    said = [f"Last prompt, node {one.node}\n{one.text}" for one in alone if one.prompt == alone[0].prompt]
    if run is None or run.figures is None:
        if said:
            return "\n\n".join(said)
        return not_run_text(pools[-1]) if pools else unused_text(asked) if asked else NO_POOL
    pool = next(one for one in pools if one.id == run.pool)
    head = [f"{pool.layout}, {pool.backend}, {pool.state}", pool.grid]
    others = [one for one in pools if one is not pool and one.state != "closed"]
    parts = [
        *said,
        speed_text(run.speed) if run.speed is not None else "",
        queue_text(run.steps.queue, ahead) if run.steps.queue is not None else "",
        prompt_text(run.steps.prompt) if run.steps.prompt is not None else "",
        plan_text(run.plan) if run.plan is not None else "",
        "\n".join([*head, *(f"  {share.english}" for share in pool.shares)]),
        run_text(run.figures),
        "\n".join(["What slowed it", *(f"  {cause.english}" for cause in run.slowed)]) if run.slowed else "",
        held_text(pool),
        memory_text(pool.ranks),
        "\n".join(f"Another pool: {other.layout}, {other.state}" for other in others),
    ]
    return "\n\n".join(filter(None, parts))


def speed_text(speed: Speed) -> str:
    """Say how much faster the run was than one GPU, and how that is known."""
    if speed.ratio is None:
        return (
            f"{speed.step_s:.2f} s per step. One device was not timed for this model and size:\nto compare,"
            " turn auto mode off, bypass PipeMesh Parallelize (Ctrl+B) if the workflow has it, and run once."
        )
    how = "timed here" if speed.measured else "predicted, not timed"
    return (
        f"{speed.ratio:.2f} times as fast as one device: {speed.step_s:.2f} s per step, one device"
        f" {speed.one_gpu_s:.2f} s ({how})"
    )


def queue_text(queue: QueueFigures, ahead: Images) -> str:
    """Say how many images were sampled together, and how much longer the first image took for
    it.
    """
    counts = queue.at_once, queue.queued, ahead.used, ahead.dropped
    parts = [Text("queue", tuple(map(str, counts))).english]
    if queue.step_s is not None and queue.first_s is not None:
        seconds = tuple(f"{one:.2f}" for one in (queue.step_s, queue.first_s, queue.step_s / queue.at_once))
        parts.append(Text("queue_first", seconds).english)
    return "\n".join(parts)


def prompt_text(prompt: PromptFigures) -> str:
    """Say how many seconds each part of the prompt took until now, and how many of them no pool can
    save.
    """
    seconds = [
        ("loading, until it computes", prompt.loading_s),
        ("first evaluation", prompt.first_s),
        ("sampling after it", prompt.sampling_s),
    ]
    for one in prompt.vae:
        seconds.append((f"{WORKS[one.work]}, by {'workers' if one.in_pool else 'one device'}", one.seconds))
    seconds.append(("left if workers took no time", prompt.left_s))
    rows = ["What the prompt waited for, without other nodes"]
    rows += in_columns([(name, f"{value:.2f} s") for name, value in seconds])
    if prompt.speedup is not None:
        bound = f"at most {prompt.at_most:.2f} times"
        rows.append(f"  in all {prompt.speedup:.2f} times as fast as one device, {bound}")
    return "\n".join(rows)


def plan_text(plan: PlanFigures) -> str:
    """Say which layout was chosen, why, and why others were not."""
    if plan.predicted_ms is None:
        return f"Layout taken: {plan.layout}; nothing was predicted: {plan.why}"
    faster = f", {plan.speedup:.2f} times as fast as one device" if plan.speedup not in (None, 1.0) else ""
    rows = [
        f"Layout chosen: {plan.layout}, {plan.why}",
        f"  for {plan.asked}",
        f"  predicted per evaluation: {plan.predicted_ms:.1f} ms{faster}",
    ]
    if plan.achieved_ms is not None:
        rows.append(f"  achieved: {plan.achieved_ms:.1f} ms")
    rows += [f"  {loser_text(loser)}" for loser in plan.losers[:SHOWN]]
    if len(plan.losers) > SHOWN:
        rows.append(f"  and {len(plan.losers) - SHOWN} more")
    return "\n".join(rows)


def loser_text(loser: Loser) -> str:
    return f"{loser.layout}: {loser.why.english}"


def unused_text(pool: Placement) -> str:
    devices = ", ".join(dict.fromkeys(device.name for device in pool.devices))
    return (
        f"The pool {pool.layout.equation()} on {devices} ({pool.backend}) has sampled nothing: connect the"
        " same PipeMesh Pool to the PipeMesh Parallelize before the sampler, or leave this node's pool open"
        " to see the pool that sampled last."
    )


def not_run_text(pool: PoolStatus) -> str:
    state = "has no worker up" if pool.state == "closed" else f"is {pool.state}"
    return (
        f"The pool {pool.layout} {state} and has no run to report: run a sampler on it, and connect the"
        " sampler's LATENT to this node."
    )


def run_text(run: RunFigures) -> str:
    sent = ("sent per rank and evaluation", f"{run.bytes_per_evaluation / 2**20:.2f} MiB")
    title = f"Last run: {run.evaluations} evaluation{'' if run.evaluations == 1 else 's'} of the model"
    if run.in_patches:
        rows = [
            ("whole evaluations (warm-up)", str(run.in_patches.whole)),
            ("time per evaluation (mean)", f"{run.step_ms_mean:.1f} ms"),
            sent,
            *([("ranks that computed", busy_text(run.busy))] if run.busy else []),
            *([("waited for messages", by_axis_text(run.exchange_by_axis))] if run.exchange_by_axis else []),
        ]
        return "\n".join([f"{title}, {sampled_text(run.in_patches)}", *in_columns(rows)])
    share = "not measured with nccl" if run.exchange_share is None else f"{100 * run.exchange_share:.1f} %"
    rows = [
        ("time per evaluation", f"{run.step_ms_p50:.1f} ms"),
        ("share of communication", share),
        *([("of it", by_axis_text(run.exchange_by_axis))] if run.exchange_by_axis else []),
        ("hop to the pool and back", f"{run.hop_ms_p50:.2f} ms"),
        sent,
    ]
    return "\n".join([title if run.evaluations == 1 else f"{title}, times are medians", *in_columns(rows)])


def busy_text(shares: Sequence[float]) -> str:
    """Say in which share of the time each rank computed, and name the one that others wait for."""
    slowest = max(range(len(shares)), key=shares.__getitem__)
    text = ", ".join(f"{share:.0%}" for share in shares)
    return (
        f"{text}; the others wait for rank {slowest}" if shares[slowest] > WAITED_FOR * min(shares) else text
    )


def by_axis_text(shares: Mapping[str, float]) -> str:
    """Say in which share of the time a rank waited for messages of each axis, the largest first."""
    return ", ".join(
        f"{axis} {100 * share:.1f} %" for axis, share in sorted(shares.items(), key=lambda one: -one[1])
    )


def sampled_text(run: InPatches) -> str:
    return f"sampled in {run.patches} patches, {run.mode}" if run.patches else "sampled whole"


def held_text(pool: PoolStatus) -> str:
    rows = [
        ("models it holds", str(len(pool.models))),
        ("models loaded so far", str(pool.loads)),
        ("weight patches so far", str(pool.patchings)),
        ("prompts sent so far", str(pool.conditioning_uploads)),
    ]
    kept = [f"  weights of {one.title}: {one.kept}, {one.why}" for one in pool.models if one.why]
    kept += [f"  {one.title}: {text.english}" for one in pool.models for text in one.graphs]
    return "\n".join(["Pool", *in_columns(rows), *kept, *kernel_lines(pool.kernels)])


def kernel_lines(kernels: RingKernels) -> list[str]:
    """Name the kernel of the ring's attention, rank by rank if they differ, and the kernels that
    were refused.
    """
    if not kernels.names:
        return []
    text = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(kernels.names))
    if len({*kernels.names}) == 1:
        text = kernels.names[0]
    return [f"  attention around the ring: {text}", *(f"  {sentence}" for sentence in kernels.refused)]


def memory_text(ranks: Sequence[RankFigures]) -> str:
    """Have a column for sets of patched weights, and one for CUDA graphs, if a rank has some."""
    columns = {"model": "models", "sets": "LoRA sets", "graphs": "CUDA graphs", "free": "free"}
    for name in ("sets", "graphs"):
        if not any(rank.memory is not None and getattr(rank.memory, name) for rank in ranks):
            del columns[name]
    columns["total"] = "total"
    rows: list[tuple[str, ...]] = [("rank", "device", *columns.values())]
    for rank in ranks:
        held = rank.memory
        sizes = (size_text(getattr(held, name)) if held else "-" for name in columns)
        rows.append((str(rank.rank), rank.device, *sizes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else mib(nbytes)


def in_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Line up values to the right. A long one goes on behind its name, or every line would be as
    long.
    """
    width = max((len(value) for _name, value in rows if len(value) <= LONG), default=0)
    return [f"  {name:30}{value:>{width}}" for name, value in rows]
