"""`python3 -m lab redundancy MODEL`: how much the output of each block changes from one
evaluation to the next, as a table and a heat map, and the warm-up that PipeFusion should have.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean, median
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors import SafetensorError

from ...launcher.cache import cache_folder
from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ...parallel_runtime.methods.blocks import blocks_of
from ...parallel_runtime.planner.warm_up import FOLDER, file_digest
from ..demo_nodes.captions import conditioning
from ..pictures.files import ASSETS, MODEL
from ..pictures.scenes import scenes_by_chance

DEMO = "demo"
PROMPTS, SEED = 8, 31
CELL, LEFT, TOP = 22, 130, 24
SETTLED = 1.5  # times the median change of the run


@dataclass(frozen=True)
class Redundancy:
    """Change of each block, by its name: over each evaluation but the first, the distance to its
    output in the evaluation before, relative to that output (after arXiv 2411.13588).
    """

    changes: Mapping[str, Sequence[float]]

    @property
    def evaluations(self) -> int:
        return len(next(iter(self.changes.values()))) + 1

    @property
    def by_evaluation(self) -> list[float]:
        """The mean over all blocks, from the second evaluation on."""
        return [fmean(values) for values in zip(*self.changes.values(), strict=True)]

    @property
    def warm_up(self) -> int:
        """The fewest first evaluations, one at least, after which blocks change no more than
        ``SETTLED`` times what is usual in the run.
        """
        means = self.by_evaluation
        usual = median(means)
        settled = (number for number, change in enumerate(means, 1) if change <= SETTLED * usual)
        return next(settled, len(means))


def main(argv: list[str], host: ComfyInstall) -> int:
    options = parse(argv)
    file = ASSETS / MODEL if options.model == DEMO else Path(options.model)
    if not file.is_file():
        raise LaunchError(
            f'There is no file {file}: name a diffusion model, or "{DEMO}" for the trained one.'
        )

    import comfy.cli_args

    comfy.cli_args.args.cpu = comfy.cli_args.args.cpu or not torch.cuda.is_available()
    import comfy.samplers

    if options.sampler not in comfy.samplers.SAMPLER_NAMES:
        raise LaunchError(
            f"ComfyUI has no sampler {options.sampler}: choose {', '.join(comfy.samplers.SAMPLER_NAMES)}."
        )
    model = loaded(file)
    found = measured(
        model, conds_of(model, options.model == DEMO), options.steps, options.sampler, options.side
    )
    if options.smallest:
        print(table(found))
        return 0
    stored = store(found, file, options)
    if options.json:
        print(json.dumps(json.loads(stored.read_text())))
        return 0
    print(table(found))
    print(f"\nA warm-up of {found.warm_up} is enough for blocks to change as little as they usually do.")
    print(f"  {stored}\n  {stored.with_suffix('.png')}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab redundancy",
        description="Measure how much a model's blocks change from one evaluation to the next.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO,
        metavar="MODEL",
        help='a file of a model with tokens and one pooled vector as text (default: the trained one, "demo")',
    )
    parser.add_argument("--steps", type=int, default=20, help="of the run (default 20)")
    parser.add_argument("--sampler", default="euler", help="of ComfyUI's (default euler)")
    parser.add_argument("--side", type=int, default=128, help="of the image, in pixels (default 128)")
    parser.add_argument("--json", action="store_true", help="print what is stored")
    parser.add_argument(
        "--smallest", action="store_true", help="two steps of a small image; nothing is stored"
    )
    options = parser.parse_args(argv)
    if options.smallest:
        options.steps, options.side = 2, 16
    for name, least in (("steps", 2), ("side", 16)):
        if (given := getattr(options, name)) < least:
            parser.error(f"--{name} {given}: choose {least} or more")
    return options


def loaded(file: Path) -> Any:
    import comfy.sd

    try:
        return comfy.sd.load_diffusion_model(str(file))
    except (RuntimeError, ValueError, SafetensorError, UnpicklingError) as error:
        raise LaunchError(
            f"ComfyUI reads no diffusion model from {file}: {str(error).splitlines()[0]}"
        ) from error


def conds_of(model: Any, is_demo: bool) -> tuple[Any, Any]:
    """Return positive and negative conditioning: captions, or text by chance in the model's widths,
    which shows less of what a real prompt would.
    """
    if is_demo:
        tokens = torch.stack([conditioning(scene) for scene in scenes_by_chance(SEED, PROMPTS)])
        empty = torch.zeros_like(tokens)
        return [[tokens, {"pooled_output": tokens.flatten(1)}]], [
            [empty, {"pooled_output": empty.flatten(1)}]
        ]
    config = model.model.model_config.unet_config
    if not (config.get("context_in_dim") and config.get("vec_in_dim")):
        raise LaunchError(
            f"{type(model.model).__name__} takes other text than this command makes: it makes tokens and one"
            " pooled vector."
        )
    chance = torch.Generator().manual_seed(SEED)
    text, pooled = (
        torch.randn(1, *shape, generator=chance)
        for shape in ((64, config["context_in_dim"]), (config["vec_in_dim"],))
    )
    return [[text, {"pooled_output": pooled}]], [
        [torch.zeros_like(text), {"pooled_output": torch.zeros_like(pooled)}]
    ]


def measured(model: Any, conds: tuple[Any, Any], steps: int, sampler: str, side: int) -> Redundancy:
    """Sample once; both prompts of an evaluation count as one output."""
    import comfy.sample

    positive, negative = conds
    empty = comfy.sample.fix_empty_latent_channels(
        model, torch.zeros(len(positive[0][0]), 16, side // 8, side // 8)
    )
    noise = torch.randn(empty.shape, generator=torch.Generator().manual_seed(SEED))
    with changes_of(model.model.diffusion_model) as changes, torch.inference_mode():
        how = (steps, 3.0, sampler, "simple", positive, negative, empty)
        comfy.sample.sample(model, noise, *how, disable_pbar=True, seed=SEED)
    return Redundancy({name: tuple(values) for name, values in changes.items()})


@contextmanager
def changes_of(model: torch.nn.Module) -> Iterator[Mapping[str, Sequence[float]]]:
    """Watch the blocks of a model while it samples. An evaluation whose batch has another shape
    than the one before, such as one of a single prompt, is compared with the last of its shape.
    """
    from ...parallel_runtime.refusals import require_plan

    changes: dict[str, list[float]] = {}
    last: dict[tuple[str, torch.Size], torch.Tensor] = {}
    handles = []

    def watch(name: str) -> Any:
        def left(block: torch.nn.Module, arguments: Any, output: Any) -> None:
            now = (output[0] if isinstance(output, (tuple, list)) else output).detach().float()
            before = last.get((name, now.shape))
            if before is not None:
                changes.setdefault(name, []).append(float((now - before).norm() / before.norm()))
            last[name, now.shape] = now.clone()

        return left

    for container, index, group in blocks_of(model, require_plan(model)):
        handles.append(container[index].register_forward_hook(watch(f"{group.path}.{index}")))
    try:
        yield changes
    finally:
        for handle in handles:
            handle.remove()


def table(found: Redundancy) -> str:
    """A row for each block, a column for each evaluation from the second on; in per cent."""
    width = max(map(len, found.changes))
    lines = [
        f"{'change in %':{width}}" + "".join(f"{number:5}" for number in range(2, found.evaluations + 1))
    ]
    rows = {**found.changes, "mean": found.by_evaluation}
    return "\n".join(
        [
            *lines,
            *(
                f"{name:{width}}" + "".join(f"{100 * value:5.0f}" for value in values)
                for name, values in rows.items()
            ),
        ]
    )


def heat_map(found: Redundancy) -> Image.Image:
    """A row for each block, a column for each evaluation; the darker, the larger the change."""
    size = (LEFT + CELL * (found.evaluations - 1) + 8, TOP + CELL * len(found.changes) + 8)
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    largest = max(map(max, found.changes.values())) or 1.0
    pen.text((4, 6), f"white 0 %, dark {100 * largest:.0f} %; evaluations from the second on", fill="black")
    for row, (name, values) in enumerate(found.changes.items()):
        top = TOP + row * CELL
        pen.text((4, top + 5), name, fill="black")
        for column, value in enumerate(values):
            light = 1 - value / largest
            colour = tuple(round(dark + (255 - dark) * light) for dark in (20, 40, 120))
            left = LEFT + column * CELL
            pen.rectangle((left, top, left + CELL - 2, top + CELL - 2), fill=colour)
    return picture


def store(found: Redundancy, file: Path, options: argparse.Namespace) -> Path:
    """Write table and heat map into the cache folder, under a digest of the model's content, where
    the planner finds them.
    """
    folder = cache_folder(os.environ) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / f"{file.stem}-{file_digest(file)}-{options.sampler}-{options.steps}.json"
    heat_map(found).save(stored.with_suffix(".png"))
    about = {
        "model": file.name,
        "sampler": options.sampler,
        "steps": options.steps,
        "warm_up": found.warm_up,
        "evaluations": found.evaluations,
    }
    part = stored.with_suffix(".part")
    part.write_text(json.dumps({**about, "changes": found.changes}), encoding="utf-8")
    part.replace(stored)
    return stored
