"""``python3 -m lab dryrun``: run the ranks of a layout on GPUs that are not there, and print
what each computes, holds and sends in one evaluation of a released model.

Exits with 1 if a rank fails, or a figure is not what the formulas say.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from ...parallel_runtime.errors import LayoutError
from ...parallel_runtime.families.catalogue import FAMILIES, RELEASED, Family
from ...parallel_runtime.families.sample import Released
from ...parallel_runtime.layout import Layout
from . import dry_table
from .plan import parsed_size

if TYPE_CHECKING:
    from ...launcher.comfyui.host_record import ComfyInstall

WORLD_SIZES = (2, 4, 8)
ROW = "{:22}{:24}{:>5}{:>9}{:>9}{:>9}{:>10}{:>8}{:>8}  {}"
HEAD = ROW.format("model", "layout", "rank", "weights", "sharded", "TFLOP", "sent MiB", "peak", "kept", "")


@dataclass(frozen=True)
class Chosen:
    """A model and the layouts to run it on: on every rank, or on the last one. ``kept``: how ranks
    keep its weights.
    """

    name: str
    layouts: Sequence[Layout]
    on_all: bool
    kept: Literal["whole", "sharded"] = "whole"


def layouts(world_size: int) -> list[Layout]:
    """Every method at this many ranks: each axis alone, and each with each other one."""
    alone = [Layout(**{axis: world_size}) for axis in ("ulysses", "ring", "pipefusion")]
    if world_size < 4:
        return alone
    half = world_size // 2
    return [
        *alone,
        Layout(ulysses=half, ring=2),
        Layout(ulysses=2, pipefusion=half),
        Layout(ring=2, pipefusion=half),
    ]


def parsed_layout(text: str) -> Layout:
    """``ulysses=2,ring=2`` -> the layout."""
    try:
        return Layout(
            **{axis: int(degree) for axis, _, degree in (part.partition("=") for part in text.split(","))}
        )
    except (TypeError, ValueError, LayoutError) as error:
        axes = ", ".join(Layout().degrees())
        raise argparse.ArgumentTypeError(
            f"{text!r} is no layout ({error}): write AXIS=DEGREE,AXIS=DEGREE with {axes}"
        ) from error


def cover() -> Iterator[Chosen]:
    """Yield what the tests run: each kind of method on the last rank of the model with the fewest
    blocks, for the time it takes, also with its weights shared out; and a row of the documents'
    table.
    """
    kinds = (layouts(2)[2], layouts(8)[0], layouts(4)[3], layouts(8)[4], layouts(8)[1], layouts(4)[5])
    quick = quickest()
    yield Chosen(quick.name, [*kinds, Layout(ulysses=4)], on_all=False)
    yield Chosen(quick.name, [kinds[1], kinds[3]], on_all=False, kept="sharded")
    shown = min((one for _, one in RELEASED.values() if one.title), key=blocks_of)
    yield Chosen(shown.name, layouts(2)[:1], on_all=True)


def quickest() -> Released:
    """Return the model with the fewest blocks of those that every method runs."""
    models = (
        one
        for family in FAMILIES
        if can_be_cut(family)
        for sample in family.samples
        for one in sample.form.released
    )
    return min(models, key=blocks_of)


def can_be_cut(family: Family) -> bool:
    """Return whether stages can hold the family's models, and patches run through them."""
    return not any(plan.why_no_stages or plan.together.always for plan in family.plans)


def blocks_of(released: Released) -> int:
    return sum(released.size.blocks)


def chosen(options: argparse.Namespace) -> Iterator[Chosen]:
    names = options.family or list(RELEASED)
    if options.cover and options.replays:
        in_turn = cycle((Layout(ulysses=4), Layout(ring=4), Layout(ulysses=2, ring=2)))
        yield from (Chosen(name, [next(in_turn)], on_all=False) for name in names)
        return
    if options.cover:
        yield from (case for case in cover() if case.name in names)
        return
    if options.table:
        wanted = [layout for size in WORLD_SIZES for layout in layouts(size)[:3]]
        yield from (Chosen(name, wanted, on_all=True) for name in names if RELEASED[name][1].title)
        return
    if options.smallest:
        yield Chosen(quickest().name, layouts(2)[:1], on_all=False)
        return
    for name in names:
        wanted = options.layout or [layout for size in WORLD_SIZES for layout in layouts(size)]
        yield Chosen(name, wanted, on_all=True, kept=options.weights)
        if options.all:
            yield Chosen(name, [Layout(ulysses=size) for size in WORLD_SIZES], on_all=False, kept="sharded")


def records(
    chosen: Chosen, extent: tuple[int, int, int] | None, patches: int, built: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Run a model dry: first on one device, then each layout. ``refused``: why a pool would not
    have it. ``built``: the last model and what it is alone, by its name.
    """
    from ...parallel_runtime.planner.prediction import sharded_bytes
    from ..dry_run import expected
    from ..dry_run.ranks import DryRanks

    if chosen.name not in built:
        built.clear()
        model = DryRanks(*RELEASED[chosen.name], extent)
        built[chosen.name] = model, model.whole()
    model, whole = built[chosen.name]
    head = {"model": chosen.name, "title": model.released.title, "extent": model.extent}

    def place(layout: Layout, rank: int) -> dict[str, Any]:
        return {**head, "layout": layout.degrees(), "equation": layout.equation(), "rank": rank}

    alone = {
        "weight_bytes": whole.weight_bytes,
        "flops": whole.flops,
        "around_flops": whole.around_flops,
        "peak_bytes": whole.activations.peak_bytes,
    }
    weights = {
        "table_bytes": whole.shareable.aside,
        "turn_bytes": expected.turn_bytes(whole),
    }
    yield {**place(Layout(), 0), **alone, **weights, "sent_bytes": {}, "misses": []}
    for layout in chosen.layouts:
        last = layout.world_size - 1
        if layout.stages > 1 and model.plan.why_no_stages:
            yield {**place(layout, last), "refused": model.plan.why_no_stages, "misses": []}
            continue
        for rank in range(layout.world_size) if chosen.on_all else [last]:
            here = {**place(layout, rank), "weights": chosen.kept}
            try:
                figures = model.rank(layout, rank, whole, patches, chosen.kept)
            except Exception as error:  # noqa: BLE001 what a rank would die of is the result
                yield {**here, "misses": [f"{type(error).__name__}: {error}".strip()]}
                continue
            misses = expected.misses(whole, layout, figures, is_sharded=chosen.kept == "sharded")
            own = {name: value for name, value in vars(figures).items() if name != "watched"}
            watched = {
                "waits": {str(wait): count for wait, count in figures.watched.waits.items()},
                "later_waits": {str(wait): count for wait, count in figures.watched.later_waits.items()},
                "own_later_waits": sum(
                    count for wait, count in figures.watched.later_waits.items() if wait.is_ours
                ),
                "launches": figures.watched.launches,
                "merged_in_one": figures.watched.launches - figures.watched.spared,
                "stock_launches": whole.launches,
                "predicted_launches": expected.launches(whole, layout, figures),
                "unaligned": figures.watched.unaligned,
            }
            shared = {"sharded_weight_bytes": sharded_bytes(whole, layout, figures.stage)}
            replayed = vars(model.replays(layout, chosen.kept)) if rank == last else {}
            if replayed.get("pieces"):
                replayed = {**replayed, "predicted_replay": expected.replay_launches(whole, layout)}
            yield {**here, **own, **shared, **watched, **replayed, "misses": misses}


def replays(chosen: Chosen, extent: tuple[int, int, int] | None, is_small: bool) -> Iterator[dict[str, Any]]:
    """Say what the last rank of each layout does for a replay; with ``is_small`` of a model with
    one block of each kind.
    """
    from ..dry_run.ranks import DryRanks

    sample, released = RELEASED[chosen.name]
    if is_small:
        size = replace(released.size, blocks=tuple(min(1, count) for count in released.size.blocks))
        released = replace(released, size=size)
    model = DryRanks(sample, released, extent)
    for layout in chosen.layouts:
        place = {"model": chosen.name, "layout": layout.degrees(), "equation": layout.equation()}
        made = vars(model.replays(layout, chosen.kept))
        yield {**place, "rank": layout.world_size - 1, **made, "misses": []}


def row(record: dict[str, Any]) -> str:
    def number(name: str, unit: float) -> str:
        return f"{record[name] / unit:.2f}" if name in record else ""

    sent = f"{sum(record['sent_bytes'].values()) / (1 << 20):.1f}" if "sent_bytes" in record else ""
    weights = [number("weight_bytes", 1 << 30), number("sharded_weight_bytes", 1 << 30)]
    figures = [
        *weights,
        number("flops", 1e12),
        sent,
        number("peak_bytes", 1 << 30),
        number("kept_bytes", 1 << 30),
    ]
    said = f"refused: {record['refused']}" if "refused" in record else "; ".join(record["misses"])
    return ROW.format(record["model"], record["equation"], record["rank"], *figures, said).rstrip()


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab dryrun",
        description=(
            "Show what each rank of a layout computes, holds and sends in one evaluation, on GPUs that are"
            " not there."
        ),
    )
    parser.add_argument(
        "--family",
        choices=RELEASED,
        action="append",
        metavar="F",
        help=f"several times for several: {', '.join(RELEASED)}",
    )
    parser.add_argument(
        "--layout",
        type=parsed_layout,
        action="append",
        help="such as ulysses=4,ring=2; several times for several",
    )
    parser.add_argument(
        "--size",
        type=parsed_size,
        metavar="WxHxFRAMES",
        help="in pixels (default: what is usual for the model)",
    )
    parser.add_argument(
        "--patches", type=int, default=0, help="of a pipeline (default: one more than stages)"
    )
    parser.add_argument(
        "--weights",
        choices=("whole", "sharded"),
        default="whole",
        help="how ranks keep them (default: whole)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"every model and method on {', '.join(map(str, WORLD_SIZES))} ranks",
    )
    parser.add_argument("--cover", action="store_true", help="only those that the tests run")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the table of lab/docs/CUDA.md, of --family alone or of all its models",
    )
    parser.add_argument(
        "--smallest", action="store_true", help="one rank of two, of the model with the fewest blocks"
    )
    parser.add_argument(
        "--replays",
        action="store_true",
        help="only what the last rank's CPU does for an evaluation that is replayed, one object per line",
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args(argv)
    if not (options.family or options.all or options.cover or options.table or options.smallest):
        parser.error("choose --family F, --all, --cover, --table or --smallest")

    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True  # what ComfyUI chooses on a GPU
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # the host's modules print
        import comfy.model_base
    gc.freeze()  # garbage is looked for in each rank, and not in what was imported
    print_to = sys.stderr if options.table else sys.stdout
    in_json = options.json or options.replays
    if not in_json:
        print(HEAD.rstrip(), flush=True, file=print_to)
    for name, reason in (
        [item for family in FAMILIES for item in family.unreleased.items()] if options.all else ()
    ):
        print(f"left out: {name.partition(':')[2]}, {reason}", file=sys.stderr)
    found, built = [], {}
    for one in chosen(options):
        if options.replays:
            made = replays(one, options.size, is_small=options.cover)
        else:
            made = records(one, options.size, options.patches, built)
        while True:
            with contextlib.redirect_stdout(sys.stderr):  # the host's modules print
                record = next(made, None)
            if record is None:
                break
            found.append(record)
            print(json.dumps(record) if in_json else row(record), flush=True, file=print_to)
    if options.table:
        print("\n".join(dry_table.lines(found)))
    return 1 if any(record["misses"] for record in found) and not options.smallest else 0
