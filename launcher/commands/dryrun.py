"""``python3 -m launcher dryrun``: run the ranks of a layout on GPUs that are not there, and print
what each computes, holds and sends in one evaluation of a released model.

Exits with 1 if a rank fails, or a figure is not what the formulas say.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...parallel_runtime.errors import LayoutError
from ...parallel_runtime.families import FAMILIES, SAMPLES
from ...parallel_runtime.families.sample import Released, Sample
from ...parallel_runtime.layout import Layout

if TYPE_CHECKING:
    from ..comfyui.find import ComfyInstall

MODELS: dict[str, tuple[Sample, Released]] = {one.name: (sample, one) for sample in SAMPLES.values() for one in sample.form.released}
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
    """Every method at this many ranks: each axis alone, and Ulysses with each other one."""
    alone = [Layout(**{axis: world_size}) for axis in ("ulysses", "ring", "pipefusion")]
    if world_size < 4:
        return alone
    return [*alone, Layout(ulysses=world_size // 2, ring=2), Layout(ulysses=2, pipefusion=world_size // 2)]


def parsed_layout(text: str) -> Layout:
    """``ulysses=2,ring=2`` -> the layout."""
    try:
        return Layout(**{axis: int(degree) for axis, _, degree in (part.partition("=") for part in text.split(","))})
    except (TypeError, ValueError, LayoutError) as error:
        axes = ", ".join(Layout().degrees())
        raise argparse.ArgumentTypeError(f"{text!r} is no layout ({error}): write AXIS=DEGREE,AXIS=DEGREE with {axes}") from error


def parsed_size(text: str) -> tuple[int, int, int]:
    """``1280x720x81`` -> width, height, frames; without frames, one."""
    sizes = text.split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    width, height, frames = map(int, [*sizes, "1"][:3])
    return width, height, frames


def cover() -> Iterator[Chosen]:
    """Yield what the tests run: each kind of method on the last rank, each with another family as
    far as there are so many: of each its model with the fewest blocks, for the time it takes. Of
    one model also with its weights shared out.
    """
    kinds = (layouts(2)[2], layouts(8)[0], layouts(4)[3], layouts(8)[4], layouts(2)[1])
    models = [[one for sample in family.samples for one in sample.form.released] for family in FAMILIES]
    quick = sorted((min(of_family, key=blocks_of) for of_family in models if of_family), key=blocks_of)
    tried: dict[str, list[Layout]] = {}
    for number, layout in enumerate(kinds):
        tried.setdefault(quick[number % len(quick)].name, []).append(layout)
    yield from (Chosen(name, wanted, on_all=False) for name, wanted in tried.items())
    yield Chosen(quick[1].name, [kinds[1], kinds[3]], on_all=False, kept="sharded")


def blocks_of(released: Released) -> int:
    return sum(released.size.blocks)


def chosen(options: argparse.Namespace) -> Iterator[Chosen]:
    names = [options.family] if options.family else list(MODELS)
    if options.cover:
        yield from (case for case in cover() if case.name in names)
        return
    for name in names:
        wanted = options.layout or [layout for size in WORLD_SIZES for layout in layouts(size)]
        yield Chosen(name, wanted, on_all=True, kept=options.weights)


def records(chosen: Chosen, extent: tuple[int, int, int] | None, patches: int) -> Iterator[dict[str, Any]]:
    """Run a model dry: first on one device, then each layout."""
    from ...parallel_runtime.planner import expected
    from ...parallel_runtime.planner.dry_run import DryModel

    model = DryModel(*MODELS[chosen.name], extent)
    whole = model.whole()
    head = {"model": chosen.name, "extent": model.extent}
    layers = {"weight_bytes": whole.weight_bytes, "flops": whole.flops, "around_flops": whole.around_flops, "peak_bytes": whole.peak_bytes}
    yield {**head, "layout": Layout().degrees(), "equation": Layout().equation(), "rank": 0, **layers, "sent_bytes": {}, "misses": []}
    for layout in chosen.layouts:
        last = layout.world_size - 1
        for rank in range(layout.world_size) if chosen.on_all else [last]:
            place = {**head, "layout": layout.degrees(), "equation": layout.equation(), "rank": rank, "weights": chosen.kept}
            try:
                figures = model.rank(layout, rank, whole, patches, chosen.kept)
            except Exception as error:  # noqa: BLE001 what a rank would die of is the result
                yield {**place, "misses": [f"{type(error).__name__}: {error}".strip()]}
                continue
            misses = expected.misses(whole, layout, figures, is_sharded=chosen.kept == "sharded")
            waits = {str(wait): count for wait, count in figures.waits.items()}
            shared = {"sharded_weight_bytes": expected.sharded_bytes(whole, layout, figures.stage)}
            yield {**place, **asdict(figures), **shared, "waits": waits, "misses": misses}


def row(record: dict[str, Any]) -> str:
    def number(name: str, unit: float) -> str:
        return f"{record[name] / unit:.2f}" if name in record else ""

    sent = f"{sum(record['sent_bytes'].values()) / (1 << 20):.1f}" if "sent_bytes" in record else ""
    weights = [number("weight_bytes", 1 << 30), number("sharded_weight_bytes", 1 << 30)]
    figures = [*weights, number("flops", 1e12), sent, number("peak_bytes", 1 << 30), number("kept_bytes", 1 << 30)]
    return ROW.format(record["model"], record["equation"], record["rank"], *figures, "; ".join(record["misses"])).rstrip()


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher dryrun",
        description="Show what each rank of a layout computes, holds and sends in one evaluation, on GPUs that are not there.",
    )
    parser.add_argument("--family", choices=MODELS, metavar="F", help=", ".join(MODELS))
    parser.add_argument("--layout", type=parsed_layout, action="append", help="such as ulysses=4,ring=2; several times for several")
    parser.add_argument("--size", type=parsed_size, metavar="WxHxFRAMES", help="in pixels (default: what is usual for the model)")
    parser.add_argument("--patches", type=int, default=0, help="of a pipeline (default: one more than stages)")
    parser.add_argument("--weights", choices=("whole", "sharded"), default="whole", help="how ranks keep them (default: whole)")
    parser.add_argument("--all", action="store_true", help=f"every model and method on {', '.join(map(str, WORLD_SIZES))} ranks")
    parser.add_argument("--cover", action="store_true", help="only those that the tests run")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args(argv)
    if not (options.family or options.all or options.cover):
        parser.error("choose --family F, --all or --cover")

    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True  # what ComfyUI chooses on a GPU
    import torch

    torch.set_num_threads(1)
    if not options.json:
        print(HEAD.rstrip(), flush=True)
    missed = 0
    for one in chosen(options):
        found = records(one, options.size, options.patches)
        while True:
            with contextlib.redirect_stdout(sys.stderr):  # the host's modules print
                record = next(found, None)
            if record is None:
                break
            missed += bool(record["misses"])
            print(json.dumps(record) if options.json else row(record), flush=True)
    return 1 if missed else 0
