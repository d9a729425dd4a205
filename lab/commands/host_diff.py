"""``python3 -m lab host-diff OLD NEW``: what another ComfyUI changes for PipeMesh, by the files of
both alone. Each is the folder of a ComfyUI, or a tar archive of one.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ...launcher.comfyui.host_record import ComfyInstall
from ...launcher.errors import LaunchError
from ...parallel_runtime.families.catalogue import FAMILIES, classes_of
from ...parallel_runtime.families.unplanned_models import ON_ONE_GPU, TRIED_WHOLE, WITHOUT_PLAN
from ...parallel_runtime.watch.fingerprint import HostFiles
from ..unpack import UnpackError, unpack
from .drafted import draft
from .families import transformers
from .fingerprints import classes

OPTIONS = "transformer_options"
SEAMS = {  # functions of ComfyUI that the pack stands on, beside models
    "comfy/samplers.py": ("CFGGuider", "calc_cond_batch", "_calc_cond_batch", "KSampler", "sample"),
    "comfy/model_base.py": ("BaseModel",),
    "comfy/model_patcher.py": ("ModelPatcher",),
    "comfy/patcher_extension.py": ("WrapperExecutor", "WrappersMP", "CallbacksMP"),
    "comfy/model_management.py": ("LoadedModel", "free_memory", "load_models_gpu"),
    "comfy/model_prefetch.py": ("prefetch_queue_pop",),
}


def lines(old: Path, new: Path, kinds: Sequence[str]) -> Iterator[str]:
    """Yields the report of two trees of ComfyUI, about these classes of transformers."""
    before, after = HostFiles(old), HostFiles(new)
    yield "Families whose code differs:"
    shared = Counter[str]()
    changes: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for kind in kinds:
        first, now = before.fingerprint(kind).functions, after.fingerprint(kind).functions
        changed = [name for name in first if name in now and first[name] != now[name]]
        changes[kind] = (changed, sorted(now.keys() - first), sorted(first.keys() - now))
        shared.update(name for part in changes[kind] for name in part)
    of_most = {name for name, count in shared.items() if count > len(changes) // 2}
    alike: dict[tuple[str, ...], list[str]] = {}  # what differs -> the classes in which it does
    for kind in [
        one for family in FAMILIES for plan in family.plans for one in classes_of(plan) if one in changes
    ]:
        parts = zip(("changed", "new", "gone"), changes[kind], strict=True)
        told = tuple(f"    {word} {name}" for word, part in parts for name in part if name not in of_most)
        alike.setdefault(told, []).append(kind)
    for told, kinds in alike.items():
        yield from [*(f"  {kind}" for kind in kinds), *told] if told else ()
    yield "Code of most families that differs:"
    yield from (f"  {name}" for name in sorted(of_most))
    yield "New classes of transformers:"
    known = {*classes(), *TRIED_WHOLE, *WITHOUT_PLAN, *ON_ONE_GPU}
    older, newer = transformers(old), transformers(new)
    for kind in sorted(newer.keys() - known - older.keys()):
        yield f"  {kind}"
        yield from (f"    {line}" for line in draft(new, kind, newer[kind]))
    yield "Keys of transformer_options:"
    first_keys, now_keys = option_keys(old), option_keys(new)
    yield from (f"  new {key}" for key in sorted(now_keys - first_keys))
    yield from (f"  gone {key}" for key in sorted(first_keys - now_keys))
    yield "Seams that differ:"
    for file, names in SEAMS.items():
        texts = [definitions(root / file, names) for root in (old, new)]
        yield from (f"  {file}: {name}" for name in names if texts[0].get(name) != texts[1].get(name))


def option_keys(root: Path) -> set[str]:
    """Returns the keys that ComfyUI's core reads or writes of ``transformer_options``."""
    found = set()
    for file in (root / "comfy").rglob("*.py"):
        text = file.read_bytes()
        if OPTIONS.encode() not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            holder, key = None, None
            if isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "pop")
                and node.args
            ):
                holder, key = node.func.value, node.args[0]
            if holder is not None and ast.unparse(holder).endswith(OPTIONS) and isinstance(key, ast.Constant):
                found.add(str(key.value))
    return found


def definitions(file: Path, names: Sequence[str]) -> dict[str, str]:
    if not file.is_file():
        return {}
    body = ast.parse(file.read_bytes()).body
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return {node.name: ast.dump(node) for node in body if isinstance(node, kinds) and node.name in names}


def tree_of(given: str, undo: ExitStack) -> Path:
    """Returns the folder of a ComfyUI; of an archive, of what is in it. Raises LaunchError."""
    path = Path(given)
    if path.is_file():
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pipemesh-host-")))
        try:
            unpack(path, folder)
        except UnpackError as error:
            raise LaunchError(str(error)) from error
        path = next((file.parent.parent for file in folder.glob("*/comfy/model_base.py")), folder)
    if not (path / "comfy" / "model_base.py").is_file():
        raise LaunchError(f"{given} holds no ComfyUI: name the folder of one, or a tar archive of it.")
    return path


def main(argv: Sequence[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab host-diff", description=__doc__)
    parser.add_argument("trees", nargs="*", metavar="OLD NEW")
    parser.add_argument(
        "--smallest", action="store_true", help="of one class, the ComfyUI that is here with itself"
    )
    options = parser.parse_args(argv)
    trees = [host.comfyui] * 2 if options.smallest else options.trees
    if len(trees) != 2:
        parser.error("name two: OLD NEW")
    kinds = classes()[:1] if options.smallest else classes()
    with ExitStack() as undo:
        old, new = (tree_of(tree, undo) for tree in trees)
        print("\n".join(lines(old, new, kinds)))
    return 0
