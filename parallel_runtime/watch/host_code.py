"""Finds functions of ComfyUI's own modules and classes that another pack replaced for all models:
``Model.forward = ...``, ``comfy.ldm.modules.attention.optimized_attention = ...``.

Ranks import ComfyUI without the packs, so such a change would have no effect there. ComfyUI's files
tell which code a class may run (``fingerprint``); the live code of each such function or class must
be the code in its file: a function by where it was compiled, an imported name by what its module
imports.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..forward import forward_name
from .fingerprint import FOLLOWED, BoundName, host_files
from .python_file import (
    LIBRARIES,
    NOTHING,
    Place,
    compiled_elsewhere,
    edited_function,
    file_hash,
    full_name,
    host_folder,
    is_code,
    module_of,
    python_file,
    root_of,
)


def replaced_code(
    transformer: torch.nn.Module, trusted: frozenset[str] = LIBRARIES
) -> Iterator[tuple[str, Any]]:
    """Yields (place, replacement) of each replaced function among those that a transformer may run.
    ``trusted`` are packages whose functions belong there.
    """
    found = list(_functions(transformer))
    # First what was written, then what imports it
    for culprit_of in (_compiled_elsewhere, _otherwise_imported):
        for owner, name, value in found:
            culprit = culprit_of(owner, name, value, trusted)
            if culprit is not None:
                yield f"{full_name(owner)}.{name}", culprit


class HostFunctions:
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
        """Returns the place and the replacement of a function that was replaced since, or hidden by
        a new one.
        """
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


def edited_code(transformer: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (file, function) of each file with code that a transformer may run, if it was edited
    since ComfyUI imported it: ranks import the present file.
    """
    modules = {where: sys.modules[where] for where, _ in _reached(transformer) if where in sys.modules}
    for module in modules.values():
        file = str(module.__file__)
        try:
            edited = edited_function(module, file_hash(Path(file)))
        except (OSError, SyntaxError, ValueError):  # an update that goes on, or took the file away
            yield file, module.__name__
            continue
        if edited is not None:
            yield file, edited.__qualname__


def _reached(transformer: torch.nn.Module) -> dict[Place, BoundName]:
    """Returns the code of ComfyUI's that a transformer may run, by ComfyUI's files."""
    tops = {f"{kind.__module__}:{kind.__qualname__.partition('.')[0]}" for kind in _host_classes(transformer)}
    reached = host_files(host_folder()).reached(*tops)
    return {place: told for place, told in reached.items() if place[0].startswith(FOLLOWED)}


def _functions(transformer: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yields (module or class, name, value) of everything that the transformer may call, by
    ComfyUI's files: the names that reached code looks up in its module, and the methods of classes.
    """
    classes = dict.fromkeys(_host_classes(transformer))
    for (where, bound), told in _reached(transformer).items():
        here = vars(module) if (module := sys.modules.get(where)) is not None else {}
        for name in told.names & here.keys():
            if callable(here[name]):
                yield module, name, here[name]
        if isinstance(here.get(bound), type):
            classes |= dict.fromkeys(_with_inner(here[bound]))
    around = type(transformer).__mro__ if forward_name(transformer) != "forward" else ()
    for kind in classes:
        for name, value in list(vars(kind).items()):
            # That one runs in the UI, around the remote one
            if is_code(value) and (kind not in around or name != "forward"):
                yield kind, name, value


def _host_classes(transformer: torch.nn.Module) -> set[type]:
    kinds = {kind for module in transformer.modules() for kind in type(module).__mro__}
    return {kind for kind in kinds if root_of(kind) == "comfy"}


def _with_inner(kind: type) -> Iterator[type]:
    yield kind
    for value in vars(kind).values():
        if isinstance(value, type) and full_name(value).startswith(f"{full_name(kind)}."):
            yield from _with_inner(value)


def _compiled_elsewhere(owner: Any, _name: str, value: Any, trusted: frozenset[str]) -> Any:
    return compiled_elsewhere(value, trusted | python_file(module_of(owner)).roots)


def _otherwise_imported(owner: Any, name: str, value: Any, trusted: frozenset[str]) -> Any:
    """Returns a module's value under a name that its file imports, if the value is not the imported
    one. Functions that were imported before their source was replaced do not count.
    """
    file = python_file(owner) if isinstance(owner, types.ModuleType) else NOTHING
    places = () if name in file.bound else file.imported.get(name, ())
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
