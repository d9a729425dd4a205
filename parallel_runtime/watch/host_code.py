"""Finds functions of ComfyUI's own modules and classes that another pack replaced for all models:
``Model.forward = ...``, ``comfy.ldm.modules.attention.optimized_attention = ...``.

Ranks import ComfyUI without the packs, so such a change would have no effect there. A function is
told by where it was compiled, an imported name by what its module imports.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..forward import forward_name
from .python_file import (
    LIBRARIES,
    compiled_elsewhere,
    file_of,
    full_name,
    is_code,
    module_of,
    names_in,
    root_of,
)

# What a transformer's forward runs
FOLLOWED = ("comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.rmsnorm", "comfy.float")


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
                yield f"{full_name(owner)}.{name}", culprit


class HostCode:
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
                return f"{full_name(owner)}.{name}", compiled_elsewhere(value, LIBRARIES) or value
            if isinstance(owner, type) and len(namespace) > len(known):
                for name, value in namespace.items():
                    if name not in known and is_code(value):
                        return f"{full_name(owner)}.{name}", value
        return None


def _functions(transformer: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yields (module or class, name, value) of what may be called there: functions that the files
    of the modules bind, and classes that the transformer is made of or that its code names.
    """
    classes = {kind for module in transformer.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in classes if root_of(kind) == "comfy"}
    named = named_by(kinds, FOLLOWED)
    waiting, seen = [kind.__module__ for kind in kinds], set[str]()
    while waiting:
        module = sys.modules.get(waiting.pop())
        if module is None or module.__name__ in seen or not module.__name__.startswith(FOLLOWED):
            continue
        seen.add(module.__name__)
        file = file_of(module)
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


def _compiled_elsewhere(owner: Any, _name: str, value: Any, trusted: frozenset[str]) -> Any:
    return compiled_elsewhere(value, trusted | file_of(module_of(owner)).roots)


def _otherwise_imported(owner: Any, name: str, value: Any, trusted: frozenset[str]) -> Any:
    """Returns what a module has under a name that its file imports, where that is another thing. No
    other is one that was imported before its source was replaced.
    """
    places = file_of(owner).imported.get(name, []) if isinstance(owner, types.ModuleType) else []
    expected = [
        one
        for where, what in places
        if where in sys.modules and (one := vars(sys.modules[where]).get(what)) is not None
    ]
    is_made_there = any(_is_made_in(value, where, what) for where, what in places)
    if is_made_there and compiled_elsewhere(value, trusted) is None:
        return None
    return value if expected and not any(value is one for one in expected) else None


def _is_made_in(value: Any, where: str, name: str) -> bool:
    """True for the function or class of this name that a module has; other libraries than ComfyUI
    have theirs in modules below.
    """
    home = str(getattr(value, "__module__", ""))
    return getattr(value, "__qualname__", "") == name and (
        home == where or (home.startswith(f"{where}.") and where.partition(".")[0] != "comfy")
    )


class NamedCode(NamedTuple):
    """Classes, and each (module, name) under which code looked for something."""

    classes: set[type]
    places: set[tuple[str, str]]


def named_by(kinds: Iterable[type], followed: tuple[str, ...]) -> NamedCode:
    """Returns these classes and all that their code names, at any depth, in the modules whose names
    begin with one of ``followed``.
    """
    found, waiting, seen = NamedCode(set(), set()), list[Any](kinds), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            if thing.__module__.startswith(followed):
                found.classes.add(thing)
                waiting += [*thing.__bases__, *vars(thing).values()]
        elif isinstance(thing, types.FunctionType):
            if str(thing.__globals__.get("__name__", "")).startswith(followed):
                for module, name in _places(thing):
                    found.places.add((module.__name__, name))
                    waiting.append(vars(module)[name])
            waiting += [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        else:
            inner = [getattr(thing, name, None) for name in ("__func__", "func", "fget")]
            waiting += [one for one in inner if isinstance(one, types.FunctionType)]
    return found


def _places(function: types.FunctionType) -> Iterator[tuple[types.ModuleType, str]]:
    """Yields each (module, name) that a function names: in its own module, and in those that it
    names.
    """
    names, seen = names_in(function.__code__), set[str]()
    waiting = [function.__globals__.get("__name__", ""), *(name for name in names if name in sys.modules)]
    while waiting:
        module = sys.modules.get(str(waiting.pop()))
        if module is None or module.__name__ in seen or not module.__name__.startswith("comfy"):
            continue
        seen.add(module.__name__)
        for name in names & vars(module).keys():
            if isinstance(value := vars(module)[name], types.ModuleType):
                waiting.append(value.__name__)
            else:
                yield module, name
