"""Tells which classes of ComfyUI's the code of others names: of a module that all models share, a
transformer uses few.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Named(NamedTuple):
    """Classes, and each (module, name) under which code looked for something."""

    classes: set[type]
    places: set[tuple[str, str]]


def named_by(kinds: Iterable[type], followed: tuple[str, ...]) -> Named:
    """Returns these classes and all that their code names, at any depth, in the modules whose names
    begin with one of ``followed``.
    """
    found, waiting, seen = Named(set(), set()), list[Any](kinds), set[int]()
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
            waiting += [
                one
                for name in ("__func__", "func", "fget")
                if isinstance(one := getattr(thing, name, None), types.FunctionType)
            ]
    return found


def _places(function: types.FunctionType) -> Iterator[tuple[types.ModuleType, str]]:
    """Yields each (module, name) that a function names: in its own module, and in those that it
    names.
    """
    names = names_in(function.__code__)
    waiting, seen = (
        [function.__globals__.get("__name__", ""), *(name for name in names if name in sys.modules)],
        set[str](),
    )
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


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names that a code object, and those in it, look up."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
