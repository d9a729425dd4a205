"""``python3 -m lab families``: the model families that run in parallel, how, and those that do
not and why; all of it from the registry. docs/FAMILIES.md is its ``--markdown``.
"""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...launcher.comfyui.host_record import ComfyInstall
from ...parallel_runtime.families import NOT_YET, WHOLE, WITHOUT_PLAN
from ...parallel_runtime.families.every import FAMILIES, PLANS
from ...parallel_runtime.families.plan import TokenPlan

HEAD = """\
# Model families

Written by `python3 -m lab families --markdown`; a test fails where it is stale.

*Exact*: the image of stock ComfyUI at the same seed, up to float rounding. *Approximate*: patches
look at keys and values of the step before ([PIPEFUSION.md](PIPEFUSION.md)). *Whole*: the blocks are
divided among the GPUs, and every evaluation goes through them in one piece: exact, and no faster.
*Refused*: choose Ulysses or ring. `cfg` and `data` share prompts and images out exactly in all.

"""


@dataclass(frozen=True)
class Row:
    """One token plan. ``sequence``: under Ulysses, ring and both; ``why`` PipeFusion refuses it or
    keeps it whole, or what its patches are bound by.
    """

    family: str
    models: tuple[str, ...]
    samples: tuple[str, ...]
    sequence: str
    pipefusion: str
    why: str


def rows() -> list[Row]:
    """One for each plan, in the registry's order."""
    return [
        row_of(plan, [sample.name for sample in family.samples])
        for family in FAMILIES
        for plan in family.plans
    ]


def row_of(plan: TokenPlan, samples: Sequence[str]) -> Row:
    models = tuple(model.partition(":")[2] for model in plan.models)
    return Row(plan.family, models, tuple(samples), "exact", *under_pipefusion(plan))


def under_pipefusion(plan: TokenPlan) -> tuple[str, str]:
    """Returns how PipeFusion samples such a model, and why."""
    if plan.why_no_stages:
        return "refused", plan.why_no_stages
    together = plan.together
    if together.always:
        return "whole", together.always
    notes = [
        f"step by step, because of the model's {path}, which looks at the whole image"
        for path in together.refiners
    ]
    return "approximate", "; ".join([*notes, *(f"whole with {name}" for name in together.arguments)])


def transformers(comfyui: Path) -> list[str]:
    """Returns the transformers and UNets of a ComfyUI's model types, as ``module:Class``."""
    tree = ast.parse((comfyui / "comfy" / "model_base.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    values = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "unet_model"
    ]
    values += [
        default
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
        if argument.arg == "unet_model"
    ]
    names = {ast.unparse(value) for value in values}
    dotted = {imported.get(name, ":".join(name.rpartition(".")[::2])) for name in names}
    return sorted(name for name in dotted if name.startswith("comfy."))


def in_groups() -> dict[str, str]:
    """Returns why each model that groups of one rank compute whole is never cut, by
    ``module:Class``.
    """
    return {name: WITHOUT_PLAN[name] for name in WHOLE.models}


def on_one_gpu(comfyui: Path) -> dict[str, str]:
    """Returns why each other transformer without a plan has none, by ``module:Class``."""
    planned = {model for plan in (*PLANS, WHOLE) for model in plan.models}
    return {name: WITHOUT_PLAN.get(name, NOT_YET) for name in transformers(comfyui) if name not in planned}


# docs/FAMILIES.md is published, the laboratory is not
DOCUMENTS = "https://github.com/pipemesh/pipemesh/blob/main/lab/docs"


def at_published_size() -> list[str]:
    names = [one.name for family in FAMILIES for sample in family.samples for one in sample.form.released]
    text = "Released models of every family, by the names that `dryrun --family` and `plan --family` take"
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.wrap(
        f"{text} ([CUDA.md]({DOCUMENTS}/CUDA.md), [PLANNER.md]({DOCUMENTS}/PLANNER.md)): {listed}.",
        100,
        break_on_hyphens=False,
    )


def markdown(table: Sequence[Row], others: Mapping[str, str]) -> str:
    lines = ["| Family | ComfyUI's classes | Ulysses, ring, both | PipeFusion |", "|---|---|---|---|"]
    for row in table:
        pipefusion = ": ".join(filter(None, (row.pipefusion, row.why)))
        lines.append(
            f"| {row.family} | {', '.join(f'`{model}`' for model in row.models)} | {row.sequence} |"
            f" {pipefusion} |"
        )
    lines += ["", "## At published size", "", *at_published_size()]
    lines += ["", "## A whole image on each GPU", ""]
    lines += ["With `cfg` and `data` alone, one rank for each prompt and image at a time: exact.", ""]
    lines += ["| ComfyUI's class | Why one image is not shared |", "|---|---|"]
    lines += [f"| `{name.partition(':')[2]}` | {why} |" for name, why in in_groups().items()]
    lines += ["", "## On one GPU", "", "| ComfyUI's class | Why |", "|---|---|"]
    lines += [
        f"| `{name.partition(':')[2]}` | {why} |"
        for name, why in sorted(others.items(), key=lambda item: (item[1] == NOT_YET, item[0]))
    ]
    return HEAD + "\n".join(lines) + "\n"


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab families", description="Which model families run in parallel, and how."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object")
    form.add_argument("--markdown", action="store_true", help="docs/FAMILIES.md")
    options = parser.parse_args(argv)
    table, others = rows(), on_one_gpu(Path(host.comfyui))
    if options.json:
        print(
            json.dumps(
                {"families": [asdict(row) for row in table], "in_groups": in_groups(), "one_gpu": others}
            )
        )
    elif options.markdown:
        print(markdown(table, others), end="")
    else:
        for row in table:
            why = f"; {row.why}" if row.why else ""
            print(f"{row.family:16}{row.sequence:8}{row.pipefusion:13}{', '.join(row.models)}{why}")
        for name, why in in_groups().items():
            print(f"{'-':16}{'cfg and data':21}{name.partition(':')[2]}; {why}")
        for name, why in others.items():
            print(f"{'-':16}{'one GPU':21}{name.partition(':')[2]}; {why}")
    return 0
