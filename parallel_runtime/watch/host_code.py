"""Finds functions of ComfyUI's own modules and classes that another pack replaced for all models:
``Model.forward = ...``, ``comfy.ldm.modules.attention.optimized_attention = ...``.

Ranks import ComfyUI without the packs, so such a change would have no effect there. Told are a
function by where it was compiled, and an imported name by what its module imports.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..forward import forward_name
from .named_code import named_by

LIBRARIES = frozenset(
    {"comfy", "comfy_aimdo", "comfy_extras", "comfy_kitchen", "einops", "torch", "torchvision"}
)
STANDARD = sys.stdlib_module_names | {"builtins", ""}
# What a transformer's forward runs
FOLLOWED = ("comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.rmsnorm", "comfy.float")


class Imports(NamedTuple):
    """What a module's file imports: name -> the (module, name) that it may stand for; and the first
    parts of the names of all modules. ``bound``: all names that it binds, None where it cannot be
    told; ``classes``: those of its classes.
    """

    names: dict[str, list[tuple[str, str]]]
    roots: frozenset[str]
    bound: frozenset[str] | None = None
    classes: frozenset[str] = frozenset()


def replaced_code(
    transformer: torch.nn.Module, trusted: frozenset[str] = LIBRARIES
) -> Iterator[tuple[str, Any]]:
    """Yields (where, what stands there) of each function that was replaced in the modules of a
    transformer's classes, and in those that they use. ``trusted``: packages whose functions belong
    there.
    """
    found = list(_functions(transformer))
    # First what was written, then what imports it
    for culprit_of in (_compiled_elsewhere, _otherwise_imported):
        for owner, name, value in found:
            culprit = culprit_of(owner, name, value, trusted)
            if culprit is not None:
                yield f"{_name_of(owner)}.{name}", culprit


class SeenCode:
    """The functions of these modules and classes as they are now, for a check so short that every
    evaluation can have it.
    """

    def __init__(self, transformer: torch.nn.Module):
        seen: dict[int, tuple[Any, dict[str, Any]]] = {}
        for owner, name, value in _functions(transformer):
            seen.setdefault(id(owner), (owner, {}))[1][name] = value
        self._seen = [
            (owner, vars(owner), frozenset(vars(owner)), tuple(values), list(values.values()))
            for owner, values in seen.values()
        ]

    def changed(self) -> tuple[str, Any] | None:
        """Returns where one was replaced since, or hidden by a new one, and by what."""
        for owner, namespace, known, names, values in self._seen:
            now = list(map(namespace.get, names))
            if now != values:
                name, value = next(
                    (name, one)
                    for name, one, before in zip(names, now, values, strict=True)
                    if one is not before
                )
                return f"{_name_of(owner)}.{name}", compiled_elsewhere(value, LIBRARIES) or value
            if isinstance(owner, type) and len(namespace) > len(known):
                for name, value in namespace.items():
                    if name not in known and is_code(value):
                        return f"{_name_of(owner)}.{name}", value
        return None


def _functions(transformer: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yields (module or class, name, value) of what may be called there: functions that the files
    of the modules bind, and classes that the transformer is made of or that its code names.
    """
    kinds = {
        kind
        for module in transformer.modules()
        for kind in type(module).__mro__
        if _root(kind.__module__) == "comfy"
    }
    named = named_by(kinds, FOLLOWED)
    waiting, modules = [kind.__module__ for kind in kinds], {}
    while waiting:
        module = sys.modules.get(waiting.pop())
        if module is None or module.__name__ in modules or not module.__name__.startswith(FOLLOWED):
            continue
        modules[module.__name__] = module
        file = imports_of(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                waiting.append(value.__name__)
            elif callable(value) and not name.startswith("__") and (file.bound is None or name in file.bound):
                waiting.append(str(getattr(value, "__module__", "")))
                is_class = isinstance(value, type) or name in file.classes
                if not is_class or (module.__name__, name) in named.places:
                    yield module, name, value
    around = type(transformer).__mro__ if forward_name(transformer) != "forward" else ()
    for kind in kinds | named.classes:
        for name, value in list(vars(kind).items()):
            # That one runs in the UI, around the remote one
            if is_code(value) and (kind not in around or name != "forward"):
                yield kind, name, value


def is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def _compiled_elsewhere(owner: Any, _name: str, value: Any, trusted: frozenset[str]) -> Any:
    return compiled_elsewhere(value, trusted | imports_of(_module_of(owner)).roots)


def _otherwise_imported(owner: Any, name: str, value: Any, trusted: frozenset[str]) -> Any:
    """Returns what a module has under a name that its file imports, where that is another thing. No
    other is one that was imported before its source was replaced.
    """
    places = imports_of(owner).names.get(name, []) if isinstance(owner, types.ModuleType) else []
    expected = [
        one
        for where, what in places
        if where in sys.modules and (one := vars(sys.modules[where]).get(what)) is not None
    ]
    if (
        any(_is_made_in(value, where, what) for where, what in places)
        and compiled_elsewhere(value, trusted) is None
    ):
        return None
    return value if expected and not any(value is one for one in expected) else None


def _is_made_in(value: Any, where: str, name: str) -> bool:
    """True for the function or class of this name that a module has; other libraries than ComfyUI
    have theirs in modules below.
    """
    home = str(getattr(value, "__module__", ""))
    return getattr(value, "__qualname__", "") == name and (
        home == where or (home.startswith(f"{where}.") and _root(where) != "comfy")
    )


def compiled_elsewhere(value: Any, trusted: frozenset[str]) -> Any:
    """Returns the function, at any depth of decorators, that no trusted package has; None for
    none.
    """
    for _ in range(8):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if value is None:
            return None
        if _root(_compiled_in(value)) not in trusted | STANDARD:
            return value
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        if inner is None or isinstance(value, type):
            return None
        value = inner
    return None


def _compiled_in(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        where = str(value.__globals__.get("__name__", "?"))
        return "collections" if where.startswith("namedtuple_") else where
    return str((value if isinstance(value, type) else type(value)).__module__)


def _module_of(owner: Any) -> types.ModuleType | None:
    return owner if isinstance(owner, types.ModuleType) else sys.modules.get(owner.__module__)


def imports_of(module: types.ModuleType | None) -> Imports:
    file = getattr(module, "__file__", None)
    if module is None or file is None or not file.endswith(".py"):
        return Imports({}, frozenset())
    return _imports_of(file, module.__package__ or "")


@lru_cache(maxsize=256)
def _imports_of(file: str, package: str) -> Imports:
    names: dict[str, list[tuple[str, str]]] = {}
    roots, bound, classes, imported = set(), set(), set(), set()
    waiting: list[ast.AST] = [ast.parse(Path(file).read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
            classes |= {node.name} if isinstance(node, ast.ClassDef) else set()
            bound |= {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import):
            roots |= {_root(one.name) for one in node.names}
            imported |= {one.asname or _root(one.name) for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level and not package:
                continue
            where = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else str(node.module)
            )
            roots.add(_root(where))
            for one in node.names:
                names.setdefault(one.asname or one.name, []).append((where, one.name))
        waiting += ast.iter_child_nodes(node)
    own = {name: places for name, places in names.items() if name not in bound}
    return Imports(
        own,
        frozenset(roots),
        None if "*" in names else frozenset(bound | imported | names.keys()),
        frozenset(classes),
    )


def _name_of(owner: Any) -> str:
    return (
        owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    )


def _root(name: Any) -> str:
    return str(name or "").partition(".")[0]
