"""``python3 -m lab families``: the model families that run in parallel, how, and those that do
not and why; all of it from the registry. docs/FAMILIES.md is its ``--markdown``, which first notes
the classes of the ComfyUI that it runs on in ``lab/hosts.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...launcher.comfyui.host_record import ComfyInstall
from ...parallel_runtime.families import FILES
from ...parallel_runtime.families.catalogue import REGISTERED, Family, classes_of
from ...parallel_runtime.families.plan import TokenPlan
from ...parallel_runtime.families.unplanned_models import (
    NOT_AT_HAND,
    NOT_YET,
    ON_ONE_GPU,
    TRIED_WHOLE,
    WITHOUT_PLAN,
)

HOSTS = Path(__file__).parents[1] / "hosts.json"  # ComfyUI's version -> its transformers
Hosts = Mapping[str, Sequence[str]]

HEAD = """\
# Model families

Written by `python3 -m lab families --markdown`; a test fails if it is stale.

*Exact*: the image of stock ComfyUI at the same seed, up to float rounding. *Approximate*: patches
look at keys and values of the step before
([PIPEFUSION.md](https://github.com/pipemesh/pipemesh/blob/main/docs/PIPEFUSION.md)). *Whole*: the blocks are
divided among the GPUs, and every evaluation goes through them in one piece: exact, and no faster.
*Refused*: choose Ulysses or ring. `cfg` and `data` share prompts and images out exactly in all.
The last columns say which ComfyUI has the classes: each of these versions is tested.

"""
AHEAD_OF = (
    "Before a tested version had it, `{}` was tried under Ulysses, ring, `cfg` and `data` on newer code"
    " ({}). No test repeats that until a tested version has the class."
)
IN_GROUPS = """\
With `cfg` and `data` alone, one GPU for each prompt and image at a time: exact. So is every class of
ComfyUI's that nobody has looked at, from the version on that brings it. Nobody can say of these
what a token plan would, so three things are looked at instead, and if one is found the model is
sampled on one GPU: an evaluation whose prompts and images come out otherwise when they are computed
apart (the first one of each size is computed in both ways), random numbers that the forward draws,
and what it keeps from one evaluation to the next. *Tried*: compared with stock ComfyUI, so that
random numbers and what is kept are not looked at. Two models of one class may have other layers:
images of a batch, and the two prompts of an image, that are computed apart are compared once for
each, whatever its class is called.

Stable Video Diffusion and SV3D are a `UNetModel` too, and the rows of their batch are the frames of
one video, which their layers mix. These stay on one GPU each; with a cfg above 1.0 the two prompts
go to two GPUs. With cfg 1.0 there is nothing to share out: a pool by hand refuses, and auto mode
samples on one GPU.

"""
UNSEEN = (
    "The code of {} was not at hand. A class of their own gets this; one that has a plan, in a form that"
    " no version below has, gets one GPU."
)
ONE_GPU = """\
With these models several GPUs would not make the image of one GPU, or have nothing to share.

"""


@dataclass(frozen=True)
class Row:
    """One token plan. ``sequence``: under Ulysses, ring and both; ``why`` PipeFusion refuses it or
    keeps it whole, or what its patches are bound by. ``ahead``: as a Family's.
    """

    family: str
    models: tuple[str, ...]
    samples: tuple[str, ...]
    sequence: str
    pipefusion: str
    why: str
    ahead: str = ""


def rows() -> list[Row]:
    """One for each plan, in the registry's order."""
    return [row_of(plan, family) for family in REGISTERED for plan in family.plans]


def row_of(plan: TokenPlan, family: Family) -> Row:
    names = tuple(sample.name for sample in family.samples)
    how, why = under_pipefusion(plan)
    return Row(family.name, tuple(classes_of(plan)), names, "exact", how, why, family.ahead)


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


def transformers(comfyui: Path) -> dict[str, list[str]]:
    """Returns the transformers and UNets of a ComfyUI's model types, as ``module:Class``, and of
    each those types' names.
    """
    tree = ast.parse((comfyui / "comfy" / "model_base.py").read_bytes())
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found: dict[str, list[str]] = {}
    for model in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for name in map(ast.unparse, given_as("unet_model", model)):
            kind = imported.get(name, ":".join(name.rpartition(".")[::2]))
            if kind.startswith("comfy."):
                found.setdefault(kind, []).append(model.name)
    return dict(sorted(found.items()))


def given_as(name: str, within: ast.AST) -> Iterator[ast.expr]:
    """Yields what calls give an argument of this name, and its defaults."""
    for node in ast.walk(within):
        if isinstance(node, ast.Call):
            yield from (one.value for one in node.keywords if one.arg == name)
        elif isinstance(node, ast.arguments):
            defaults = zip(reversed(node.args), reversed(node.defaults), strict=False)
            yield from (default for one, default in defaults if one.arg == name)


def in_groups(classes: Sequence[str]) -> dict[str, str]:
    """Returns why each of the models that groups of one rank compute whole is never cut, by
    ``module:Class``.
    """
    return {
        name: WITHOUT_PLAN.get(name, NOT_YET)
        for name in classes
        if name not in FILES and name not in ON_ONE_GPU
    }


def on_one_gpu(classes: Sequence[str]) -> dict[str, str]:
    """Returns why each of the others without a plan stays on one GPU, by ``module:Class``."""
    return {name: ON_ONE_GPU[name] for name in classes if name in ON_ONE_GPU}


def tested_hosts() -> Hosts:
    return json.loads(HOSTS.read_text(encoding="utf-8"))


# Made where a file is loaded, by no model type's name
OF_NO_TYPE = ("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",)
# docs/FAMILIES.md is published, the laboratory is not
DOCUMENTS = "https://github.com/pipemesh/pipemesh/blob/main/lab/docs"


def at_published_size() -> list[str]:
    names = [one.name for family in REGISTERED for sample in family.samples for one in sample.form.released]
    text = "Released models of every family, by the names that `dryrun --family` and `plan --family` take"
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.wrap(
        f"{text} ([CUDA.md]({DOCUMENTS}/CUDA.md), [PLANNER.md]({DOCUMENTS}/PLANNER.md)): {listed}.",
        100,
        break_on_hyphens=False,
    )


def markdown(table: Sequence[Row], hosts: Hosts) -> str:
    classes = sorted({name for of_host in hosts.values() for name in of_host})
    columns, rule = " | ".join(hosts), "---|" * len(hosts)
    lines = [
        f"| Family | ComfyUI's classes | Ulysses, ring, both | PipeFusion | {columns} |",
        f"|---|---|---|---|{rule}",
    ]
    for row in table:
        pipefusion = ": ".join(filter(None, (row.pipefusion, row.why)))
        names = ", ".join(f"`{short(model)}`" for model in row.models)
        lines.append(
            f"| {row.family} | {names} | {row.sequence} | {pipefusion} | {there(row.models, hosts)} |"
        )
    for row in filter(lambda row: row.ahead, table):
        names = "`, `".join(map(short, row.models))
        lines += ["", *textwrap.wrap(AHEAD_OF.format(names, row.ahead), 100)]
    lines += ["", "## At published size", "", *at_published_size()]
    lines += ["", "## A whole image on each GPU", "", *IN_GROUPS.splitlines()]
    lines += [*textwrap.wrap(UNSEEN.format(NOT_AT_HAND), 100), ""]
    lines += [
        f"| ComfyUI's class | Why one image is not shared | Tried | {columns} |",
        f"|---|---|---|{rule}",
    ]
    lines += [
        f"| `{short(name)}` | {why} | {'yes' if name in TRIED_WHOLE else 'no'} | {there([name], hosts)} |"
        for name, why in sorted(in_groups(classes).items(), key=lambda item: (item[1] == NOT_YET, item[0]))
    ]
    lines += ["", "## On one GPU", "", *ONE_GPU.splitlines()]
    lines += [f"| ComfyUI's class | Why | {columns} |", f"|---|---|{rule}"]
    lines += [
        f"| `{short(name)}` | {why} | {there([name], hosts)} |" for name, why in on_one_gpu(classes).items()
    ]
    return HEAD + "\n".join(lines) + "\n"


def short(model_class: str) -> str:
    return model_class.partition(":")[2]


def there(models: Sequence[str], hosts: Hosts) -> str:
    """Says of each host whether it has these classes."""
    return " | ".join("yes" if set(models) <= {*classes, *OF_NO_TYPE} else "no" for classes in hosts.values())


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m lab families", description="Which model families run in parallel, and how."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object")
    form.add_argument("--markdown", action="store_true", help="docs/FAMILIES.md")
    form.add_argument("--smallest", action="store_true", help="docs/FAMILIES.md, and no file is written")
    options = parser.parse_args(argv)
    table, classes = rows(), [*transformers(Path(host.comfyui))]
    if options.json:
        answer = {"families": [asdict(row) for row in table]}
        print(json.dumps({**answer, "in_groups": in_groups(classes), "one_gpu": on_one_gpu(classes)}))
    elif options.markdown or options.smallest:
        hosts = {**tested_hosts(), host.version: classes}
        text = json.dumps(hosts, indent=1, sort_keys=True)
        if options.markdown:
            HOSTS.write_text(f"{text}\n", encoding="utf-8")
        print(markdown(table, dict(sorted(hosts.items()))), end="")
    else:
        for row in table:
            why = f"; {row.why}" if row.why else ""
            names = ", ".join(map(short, row.models))
            print(f"{row.family:16}{row.sequence:8}{row.pipefusion:13}{names}{why}")
        for kind, others in (("cfg and data", in_groups(classes)), ("one GPU", on_one_gpu(classes))):
            for name, why in others.items():
                print(f"{'-':16}{kind:21}{short(name)}; {why}")
    return 0
