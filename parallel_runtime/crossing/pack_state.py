"""Plain values in a node pack's modules and classes that its code reads: ComfyUI's, which nodes may
have set at run time, are put into the modules that a rank imported.

Read is what a function names, and what the functions and classes of the pack name that it names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import Refused
from ..refusals import patch_name
from ..watch.host_code import LIBRARIES, compiled_elsewhere, imports_of, is_code
from ..watch.named_code import names_in
from ..wire.tree import is_plain
from .code import (
    CUSTOM_NODES,
    NotReferable,
    Reference,
    attribute_of,
    functions_of,
    imported,
    is_of_pack,
    module_of,
    place_of,
    resolved,
)

DEFAULTS = ("__defaults__", "__kwdefaults__")
CONTAINERS = (list, tuple, dict, set, frozenset)


class Read(NamedTuple):
    """A value that code of a pack reads: ``name`` of a module, a class or a function."""

    holder: Any
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{getattr(self.holder, '__qualname__', self.holder.__name__)}.{self.name}"


def read_by(things: list[Any]) -> Iterator[Read]:
    """Yields what functions and classes of packs read in their packs' modules."""
    waiting, seen, told = list(things), set(), set()
    while waiting:
        thing = waiting.pop()
        if (
            id(thing) in seen
            or not is_of_pack(module_of(thing))
            or (isinstance(thing, type) and issubclass(thing, Enum))
        ):
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            waiting += thing.__bases__
            yield from (
                Read(thing, name, value) for name, value in vars(thing).items() if is_sent(name, value)
            )
        for function in functions_of(thing):
            own = module_of(function)
            if own is None or not is_of_pack(own):
                continue
            # Not one that another function made, nor a decorated one
            if attribute_of(own, function.__qualname__) is function:
                yield from (
                    Read(function, name, value) for name in DEFAULTS if (value := getattr(function, name))
                )
            names = names_in(function.__code__)
            others = [
                one
                for name in names
                if isinstance(one := vars(own).get(name), types.ModuleType) and is_of_pack(one)
            ]
            for module in (own, *others):
                for name in names & vars(module).keys():
                    value = vars(module)[name]
                    require_own(module, name, value)
                    if is_sent(name, value) and (id(module), name) not in told:
                        told.add((id(module), name))
                        yield Read(module, name, value)
                    waiting.append(value if isinstance(value, (type, types.FunctionType)) else type(value))


def require_own(module: types.ModuleType, name: str, value: Any) -> None:
    """Raises Refused for a function that another pack put into a module. One of a library may have
    come there by way of another file of the pack.
    """
    own = {module.__name__.partition(".")[0]}
    culprit = (
        compiled_elsewhere(value, LIBRARIES | imports_of(module).roots | own) if is_code(value) else None
    )
    if culprit is not None and is_of_another_pack(culprit, module):
        raise Refused(
            f"{module.__name__}.{name} was replaced ({patch_name(culprit)}), which ranks know nothing of: "
            "remove the node or the pack that does it and restart ComfyUI, or leave PipeMesh Parallelize out."
        )


def is_of_another_pack(culprit: Any, module: types.ModuleType) -> bool:
    file = getattr(module_of(culprit), "__file__", None)
    if file is None:
        return True
    parts, own = Path(file).parts, Path(str(module.__file__)).parts
    if CUSTOM_NODES not in parts:
        return "site-packages" not in parts and "dist-packages" not in parts
    at = parts.index(CUSTOM_NODES) + 2
    return parts[:at] != own[:at]


def is_sent(name: str, value: Any) -> bool:
    """True for data: values, containers and objects of packs' classes. What is of libraries, such
    as a logger, what runs, and members of an Enum, are each process's own.
    """
    if name.startswith("__") or isinstance(value, (types.ModuleType, type, torch.device, Enum)):
        return False
    if is_plain(value) or isinstance(value, CONTAINERS):
        return True
    return (
        hasattr(value, "__dict__")
        and is_of_pack(module_of(type(value)))
        and not isinstance(value, types.FunctionType)
    )


def is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


class PackState:
    """In the UI: what the code of some patches reads, to be sent with them."""

    def __init__(self, things: list[Any]):
        self._read = list(read_by(things))
        self._before: list[Any] = []

    def taken(self, take: Callable[[Any, str], Any]) -> list[list]:
        """Returns it taken apart, each value with what refers to its place. A value that holds what
        cannot be sent, such as a table of functions, a cache or a lock, is each process's own.
        """
        sent, read = [], self._read
        self._read = []
        for one in read:
            with suppress(NotReferable, Refused):
                sent.append([_place(one.holder), one.name, take(one.value, str(one))])
                self._read.append(one)
        self._before = [frozen(one.value) for one in self._read]
        return sent

    def require_unchanged(self) -> None:
        """Raises Refused for one that was set since, naming it: ranks have the old value."""
        for one, before in zip(self._read, self._before, strict=True):
            now = getattr(one.holder, one.name, None)
            if frozen(now) != before:
                holder = one.holder.__name__ if is_module(one.holder) else patch_name(one.holder)
                raise Refused(
                    f"{holder}.{one.name} was changed while the model samples, and a patch in the pool "
                    "reads it: remove the node that does it, or leave PipeMesh Parallelize out."
                )


def frozen(value: Any, depth: int = 4) -> Any:
    """Returns what tells whether a value is still the same; of tensors by place and version."""
    if isinstance(value, torch.Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, dict) and depth:
        return [(key, frozen(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, CONTAINERS) and depth:
        return [frozen(item, depth - 1) for item in value]
    return value if is_plain(value) else id(value)


def _place(holder: Any) -> Reference:
    module = holder if is_module(holder) else module_of(holder)
    assert module is not None
    return [*place_of(module), "" if is_module(holder) else holder.__qualname__]


def made_state(taken: list[list], put: Callable[[Any], Any]) -> list[Read]:
    """In a rank: the inverse of ``PackState.taken``. Raises Refused."""
    return [
        Read(imported(reference[:3]) if not reference[3] else resolved(reference), name, put(value))
        for reference, name, value in taken
    ]


def put_state(state: Sequence[Read]) -> None:
    """In a rank, before each evaluation: another model's may be in place, and modules are one for
    all models of a process.
    """
    for one in state:
        setattr(one.holder, one.name, one.value)
