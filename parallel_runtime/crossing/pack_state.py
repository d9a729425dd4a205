"""Plain values in a node pack's modules and classes that its code reads: ComfyUI's, which nodes may
have set at run time, are put into the modules that a rank imported. Read is what a function names,
and what the functions and classes of the pack name that it names.
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
from ..refusals import ON_ONE_GPU, patch_name
from ..watch.python_file import (
    LIBRARIES,
    attribute_of,
    compiled_elsewhere,
    functions_of,
    is_code,
    module_of,
    names_in,
    python_file,
)
from ..wire.tree import is_plain
from .code import CUSTOM_NODES, NotReferable, is_of_pack, place_of, resolved

DEFAULTS = ("__defaults__", "__kwdefaults__")
CONTAINERS = (list, tuple, dict, set, frozenset)


class PackValue(NamedTuple):
    """A value that code of a pack reads: ``name`` of a module, a class or a function."""

    holder: Any
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{getattr(self.holder, '__qualname__', self.holder.__name__)}.{self.name}"


def read_by(things: list[Any]) -> Iterator[PackValue]:
    """Yields the values that functions and classes of packs read in their packs' modules."""
    waiting, seen, told = list(things), set(), set()
    while waiting:
        thing = waiting.pop()
        is_enum = isinstance(thing, type) and issubclass(thing, Enum)
        if id(thing) in seen or is_enum or not is_of_pack(module_of(thing)):
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            waiting += thing.__bases__
            own_values = [PackValue(thing, name, value) for name, value in vars(thing).items()]
            yield from (one for one in own_values if is_sent(one.name, one.value))
        for function in functions_of(thing):
            own = module_of(function)
            if own is None or not is_of_pack(own):
                continue
            # Not one that another function made, nor a decorated one
            if attribute_of(own, function.__qualname__) is function:
                given = [PackValue(function, name, getattr(function, name)) for name in DEFAULTS]
                yield from (one for one in given if one.value)
            names = names_in(function.__code__)
            others = [vars(own).get(name) for name in names]
            for module in (own, *(one for one in others if isinstance(one, types.ModuleType))):
                for name in names & vars(module).keys() if is_of_pack(module) else ():
                    value = vars(module)[name]
                    require_own(module, name, value)
                    if is_sent(name, value) and (id(module), name) not in told:
                        told.add((id(module), name))
                        yield PackValue(module, name, value)
                    waiting.append(value if isinstance(value, (type, types.FunctionType)) else type(value))


def require_own(module: types.ModuleType, name: str, value: Any) -> None:
    """Raises Refused for a function that another pack put into a module. One of a library may have
    come there by way of another file of the pack.
    """
    trusted = LIBRARIES | python_file(module).roots | {module.__name__.partition(".")[0]}
    culprit = compiled_elsewhere(value, trusted) if is_code(value) else None
    if culprit is not None and is_of_another_pack(culprit, module):
        raise Refused(
            f"{module.__name__}.{name} was replaced ({patch_name(culprit)}), and the workers do not have that"
            f" change: remove the node or the pack that does it and restart ComfyUI, or {ON_ONE_GPU}."
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
    """True for data: values, containers and objects of packs' classes. Objects of libraries, such
    as a logger, code, and members of an Enum stay each process's own.
    """
    if name.startswith("__") or isinstance(value, (types.ModuleType, type, torch.device, Enum)):
        return False
    if is_plain(value) or isinstance(value, CONTAINERS):
        return True
    has_own = hasattr(value, "__dict__") and not isinstance(value, types.FunctionType)
    return has_own and is_of_pack(module_of(type(value)))


class PackState:
    """In the UI: the values that the code of some patches (``things``) reads, to be sent with
    them.
    """

    def __init__(self, things: list[Any], take: Callable[[Any, str], Any]):
        """``taken`` has the values, flattened by ``take``, each with a reference to its place. A
        value that cannot be sent, such as a cache or a lock, stays each process's own.
        """
        self.taken: list[list] = []
        self._read: list[tuple[PackValue, Any]] = []
        for one in list(read_by(things)):
            with suppress(NotReferable, Refused):
                module = module_of(one.holder)
                assert module is not None
                name = "" if one.holder is module else one.holder.__qualname__
                self.taken.append([[*place_of(module), name], one.name, take(one.value, str(one))])
                self._read.append((one, version_of(one.value)))

    def require_unchanged(self) -> None:
        """Raises Refused for one that was set since, naming it: ranks have the old value."""
        for one, before in self._read:
            now = getattr(one.holder, one.name, None)
            if version_of(now) != before:
                is_module = isinstance(one.holder, types.ModuleType)
                holder = one.holder.__name__ if is_module else patch_name(one.holder)
                raise Refused(
                    f"{holder}.{one.name} was changed while the model samples, and a patch in the pool "
                    f"reads it: remove the node that does it, or {ON_ONE_GPU}."
                )


def version_of(value: Any, depth: int = 4) -> Any:
    """Returns a key that changes when the value changes: for tensors identity and version, for
    containers the keys of their items.
    """
    if isinstance(value, torch.Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, dict) and depth:
        return [(key, version_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, CONTAINERS) and depth:
        return [version_of(item, depth - 1) for item in value]
    return value if is_plain(value) else id(value)


def made_state(taken: list[list], put: Callable[[Any], Any]) -> list[PackValue]:
    """In a rank: makes the values of ``PackState.taken``. Raises Refused."""
    return [PackValue(resolved(reference), name, put(value)) for reference, name, value in taken]


def put_state(state: Sequence[PackValue]) -> None:
    """In a rank, before each evaluation: another model's may be in place, and modules are one for
    all models of a process.
    """
    for one in state:
        setattr(one.holder, one.name, one.value)
