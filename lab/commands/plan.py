"""``python3 -m launcher plan``: predict what every layout of a box would take for a job, on devices
that need not be there, and say which is the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...launcher.comfyui.host_record import ComfyInstall
from ...parallel_runtime.errors import LayoutError
from ...parallel_runtime.families.catalogue import RELEASED
from ...parallel_runtime.planner.box import Box
from ...parallel_runtime.planner.choice import Plan, Row, fastest, plan
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.job import Job
from ..boxes import published_box
from ..dry_run import decoding as decoder
from ..dry_run.decoding import Decoding

SHOWN = 12  # rows of the table for people; --all shows every one
SIZES = (1, 2, 4, 8)
PARTS = {"loading": "loading, from main memory", "sampling": "sampling", "decoding": "decoding"}
LINE = "{:34}{:>10}{:>9}{:>9}{:>10}  {:10}{}"
HEAD = LINE.format("layout", "ms/eval", "speed-up", "GiB/rank", "sent MiB", "weights", "why not")


def parsed_size(text: str) -> tuple[int, int, int]:
    """``1280x720x81`` -> width, height, frames; without frames, one."""
    sizes = text.split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    width, height, frames = map(int, [*sizes, "1"][:3])
    return width, height, frames


def known_models() -> dict[str, str]:
    """Return the names that ``--family`` takes, each with its released model: the first of a
    sample stands for it.
    """
    names = {name: name for name in RELEASED}
    for name, (sample, _) in RELEASED.items():
        names.setdefault(sample.name, name)
    return names


def counted(model: str, extent: tuple[int, int, int]) -> tuple[Whole, Decoding | None]:
    """Run the model and its VAE dry on one device, and return the counts; None of a VAE that is not
    known.
    """
    from ..dry_run.released_model import DryModel

    dry = DryModel(*RELEASED[model], extent)
    return dry.whole(), decoder.counted(type(dry.model.latent_format).__name__, dry.shape)


def record(plan: Plan, row: Row) -> dict[str, Any]:
    """Return a row as ``--json`` has it."""
    told: dict[str, Any] = {
        "layout": row.layout.degrees(),
        "equation": row.layout.equation(),
        "why_not": row.why,
        "is_approximate": row.layout.is_approximate,
    }
    if (one := row.prediction) is not None:
        told |= {
            "ms": 1e3 * one.seconds,
            "ms_by_cause": {name: 1e3 * seconds for name, seconds in one.parts.items()},
            "speedup": plan.speedup(row),
            "weights": one.kept,
            "memory_bytes": one.memory_bytes,
            "sent_bytes": dict(one.sent_bytes),
        }
    return told


def line(row: dict[str, Any]) -> str:
    """Return a row of ``--json`` as the table has it."""
    if "ms" not in row:
        return LINE.format(row["equation"], "", "", "", "", "", row["why_not"]).rstrip()
    sent = f"{sum(row['sent_bytes'].values()) / (1 << 20):.0f}"
    faster = f"{row['speedup']:.2f}x" if row["speedup"] else ""
    figures = (f"{row['ms']:.1f}", faster, f"{row['memory_bytes'] / (1 << 30):.1f}", sent, row["weights"])
    return LINE.format(row["equation"], *figures, row["why_not"] or "the fastest").rstrip()


def may_be_chosen(row: Row) -> bool:
    return row.prediction is not None and (row.loss is None or row.loss.name != "lost_approximate")


def best_of(plan: Plan, devices: int) -> Row | None:
    """Return the fastest row of so many devices or fewer, as the best of those; None where none has
    room.
    """
    rows = [row for row in plan.rows if row.layout.world_size <= devices and may_be_chosen(row)]
    best = fastest([row.prediction for row in rows if row.prediction is not None])
    return next((replace(row, loss=None) for row in rows if row.prediction is best), None)


def between_machines(plan: Plan, box: Box) -> dict[str, Row]:
    """Return, for each axis, the fastest row whose ranks along it are on several machines."""
    found: dict[str, Row] = {}
    for row in plan.rows:
        for axis in row.layout.used() if may_be_chosen(row) else ():
            if any(map(box.spans, row.layout.lines(axis.name))):
                found.setdefault(axis.name, row)
    return found


def verdict(plan: Plan) -> str:
    if plan.best is None:
        return "No layout has room for this: lower the size, or choose devices with more memory."
    if plan.best.layout.world_size == 1:
        return "One GPU is faster than any layout of several."
    speedup = plan.speedup(plan.best)
    times = f", {speedup:.2f} times as fast as one GPU" if speedup else "; one GPU has no room"
    return f"Fastest: {plan.best.layout.equation()}{times}."


def prompt_s(plan: Plan, job: Job, decoding: Decoding | None, box: Box) -> dict[str, dict[str, float]]:
    """Return the seconds of a prompt's parts on one GPU and in the pool, where both have room.
    Decoding is shared out where that is faster.
    """
    found: dict[str, dict[str, float]] = {}
    for name, row in (("one_gpu", plan.alone()), ("pool", plan.best)):
        if row is None or (one := row.prediction) is None:
            return {}
        found[name] = {
            "loading": one.weight_bytes / box.host_bytes_per_s,
            "sampling": job.evaluations * one.seconds,
        }
        if decoding is not None:
            everyone = range(row.layout.world_size)
            ranks = 1 if row.layout.stages > 1 or box.spans(everyone) else len(everyone)
            seconds = min(decoder.decoding_s(decoding, box.first(size)) for size in {1, ranks})
            found[name]["decoding"] = job.batch * seconds
    return found


def prompt_lines(seconds: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of a prompt. The last one has what would be left if ranks took no time:
    Amdahl's bound.
    """
    one, pool = seconds["one_gpu"], seconds["pool"]
    row = "  {:36}{:>10}{:>10}"
    lines = [row.format("a prompt, in seconds", "one GPU", "pool")]
    lines += [row.format(PARTS[name], f"{one[name]:.2f}", f"{pool[name]:.2f}") for name in one]
    total, faster = sum(one.values()), sum(one.values()) / sum(pool.values())
    without = "the text encoder" if "decoding" in one else "text encoder and VAE"
    lines.append(row.format(f"in all, without {without}", f"{total:.2f}", f"{sum(pool.values()):.2f}"))
    bound = total / pool["loading"]
    return [*lines, f"  {faster:.2f} times as fast; at most {bound:.1f} times, as loading stays what it is"]


def page(told: dict[str, Any], shown: int | None) -> list[str]:
    """Return what ``--json`` prints as lines for people, with so many rows of the table."""
    width, height, frames = told["extent"]
    size = f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")
    computed = f"{told['tflops']:.1f} TFLOP per evaluation of a branch"
    lines = [f"{told['model']}, {size}, {computed}, on {told['box']}", told["verdict"], ""]
    if told["prompt_s"]:
        lines += [*prompt_lines(told["prompt_s"]), ""]
    timed = "{equation}, {ms:.1f} ms per evaluation"
    for gpus, row in told["best_of"].items():
        if row is not None:
            lines.append(f"  {gpus} GPU{' ' if gpus == '1' else 's'}: {timed.format(**row)}")
    for axis, row in told["between_machines"].items():
        lines.append(f"  {axis} between machines: {timed.format(**row)}; {row['why_not'] or 'the fastest'}")
    rows = told["layouts"]
    lines += ["", HEAD, *map(line, rows[:shown])]
    more = len(rows) - len(rows[:shown])
    return [*lines, f"... and {more} more: --all"] if more else lines


def parsed(argv: list[str], names: Iterable[str]) -> tuple[argparse.Namespace, Box]:
    """Return the options, and the box that they name; exits with a sentence where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher plan",
        description="Predict what each layout of a box takes for a job: the fastest, and why others lose.",
    )
    usual = "(default: what is usual for the model)"
    boxes = "8xL40-PCIe, 8xA100-NVLink, 1xRTX4090+1xRTX3090-PCIe, 2x8xL40-PCIe-100G"
    parser.add_argument("--family", choices=names, metavar="F", required=True, help=", ".join(names))
    parser.add_argument("--size", type=parsed_size, metavar="WxH", help=f"in pixels {usual}")
    parser.add_argument("--frames", type=int, default=0, help=f"of a video {usual}")
    parser.add_argument("--box", required=True, help=f"such as {boxes}")
    parser.add_argument("--cfg", action="store_true", help="two branches in each evaluation")
    parser.add_argument("--windows", type=int, default=1, help="context windows of this size at once")
    parser.add_argument("--batch", type=int, default=1, help="images or videos at once")
    parser.add_argument("--evaluations", type=int, default=28, help="of a run (default 28)")
    parser.add_argument(
        "--approximate", action="store_true", help="choose pipefusion too, whose images differ a little"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="of pipefusion: whole evaluations (default 1)")
    parser.add_argument(
        "--patches", type=int, default=0, help="of pipefusion (default: one more than stages)"
    )
    parser.add_argument("--all", action="store_true", help=f"print every layout, not the first {SHOWN}")
    parser.add_argument("--json", action="store_true", help="one object")
    options = parser.parse_args(argv)
    for name in ("batch", "evaluations", "warm_up"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: choose 1 or more")
    if options.patches and options.patches < 2:
        choose = "choose 2 or more, as many as stages at least, or 0 for one more than stages"
        parser.error(f"--patches {options.patches}: {choose}")
    try:
        return options, published_box(options.box)
    except LayoutError as error:
        parser.error(str(error))


def main(argv: list[str], host: ComfyInstall) -> int:
    names = known_models()
    options, box = parsed(argv, names)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True  # what ComfyUI chooses on a GPU
    model = names[options.family]
    usual = RELEASED[model][1].extent
    width, height, frames = options.size or usual
    extent = (width, height, options.frames or (frames if frames > 1 else usual[2]))
    with contextlib.redirect_stdout(sys.stderr):  # the host's modules print
        whole, decoding = counted(model, extent)
    job = Job(
        whole=whole,
        evaluations=options.evaluations,
        branches=(1 + options.cfg) * options.windows,
        batch=options.batch,
        patches=options.patches,
        warm_up=options.warm_up,
    )
    found = plan(job, box, allows_approximate=options.approximate)
    sizes = sorted(size for size in {*SIZES, len(box.devices)} if size <= len(box.devices))
    best = {str(size): best_of(found, size) for size in sizes}
    told = {
        "model": model,
        "extent": extent,
        "box": box.name,
        "tflops": whole.flops / 1e12,
        "verdict": verdict(found),
        "prompt_s": prompt_s(found, job, decoding, box),
        "best_of": {size: record(found, row) if row else None for size, row in best.items()},
        "between_machines": {axis: record(found, row) for axis, row in between_machines(found, box).items()},
        "layouts": [record(found, row) for row in found.rows],
    }
    print(json.dumps(told) if options.json else "\n".join(page(told, None if options.all else SHOWN)))
    return 0
