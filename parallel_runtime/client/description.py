"""Describe a sampler's arguments, so that their present content can be kept and compared with the
arguments of another run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from .shared_evaluation import as_it_is

BY_VALUE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
NAMES = {"uuid"}  # of conds: made anew for every run
OF_CONDS = "comfy.conds"  # the module whose objects are what they hold


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor, and the device that it was on."""

    tensor: torch.Tensor
    device: torch.device

    def is_same(self, other: Held) -> bool:
        one, another = self.tensor, other.tensor
        return (self.device, one.dtype, one.shape) == (other.device, another.dtype, another.shape) and bool(
            torch.equal(one.to("cpu"), another.to("cpu"))
        )


@dataclass(frozen=True, eq=False)
class Itself:
    """Describes an object by its identity, as long as others keep it alive: a description keeps no
    MODEL in memory.
    """

    get: weakref.ref

    def is_same(self, other: Itself) -> bool:
        return self.get() is not None and self.get() is other.get()


def itself(value: Any) -> Any:
    try:
        return Itself(weakref.ref(value))
    except TypeError:  # such as a number
        return value


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that nobody else writes to."""
    return tensor.detach().to("cpu", copy=True)


def described(value: Any, keep: Callable[[torch.Tensor], torch.Tensor] = as_it_is) -> Any:
    """Returns dicts and tuples of the parts of ``value``; ``keep`` is called with each tensor. A
    value of no known class is described by its identity.
    """
    inside = partial(described, keep=keep)
    if isinstance(value, torch.Tensor):
        return Held(keep(value), value.device)
    if isinstance(value, dict):
        return {name: inside(one) for name, one in value.items() if name not in NAMES}
    if isinstance(value, (list, tuple)):
        return (itself(type(value)), *map(inside, value))
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return (itself(value.__code__), *map(inside, (cells, value.__defaults__, value.__kwdefaults__)))
    if isinstance(value, MethodType):
        return itself(value.__func__), itself(value.__self__)
    if isinstance(value, partial):
        return inside([value.func, value.args, value.keywords])
    if type(value).__module__ == OF_CONDS:
        return itself(type(value)), inside(vars(value))
    return value if isinstance(value, BY_VALUE) else itself(value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two descriptions have equal known values, and else name the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (Held, Itself)):
        return one.is_same(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other if isinstance(one, BY_VALUE) else one is other


def tensors_of(description: Any) -> Iterator[torch.Tensor]:
    if isinstance(description, Held):
        yield description.tensor
    elif isinstance(description, (dict, tuple)):
        for part in description.values() if isinstance(description, dict) else description:
            yield from tensors_of(part)
