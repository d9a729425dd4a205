"""Which class of ComfyUI's a graph is for, by the conditioning that its nodes give: a model reads
what its class names and leaves the rest unread, in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from types import CodeType, FunctionType

import comfy.model_base
import torch

from .names import TEXTS


class WrongClass(ValueError):
    """A stand-in does not read what the template's nodes give its model."""


def require_reader(stand_in: type, given: Set[str]) -> None:
    """Raises WrongClass if the class reads less than all that nodes give and another class of
    ComfyUI's reads.
    """
    for key in sorted(of_nodes(given) - read_by(stand_in)):
        if others := sorted(one.__name__ for one in model_classes() if key in read_by(one)):
            raise WrongClass(
                f"the graph gives its model {key}, which {stand_in.__name__} does not read and"
                f" {', '.join(others)} does: lab/templates/stand_ins/names.py has the file stand for another"
                " class"
            )


def alike(given: Set[str]) -> frozenset[type]:
    """The classes that read all that nodes give of what any reads."""
    known = of_nodes(given) & {key for one in model_classes() for key in read_by(one)}
    return frozenset(one for one in model_classes() if known <= read_by(one))


def of_nodes(given: Set[str]) -> frozenset[str]:
    """Without what the stand-ins of text encoders give: a file's name says that too."""
    extras = {key for _pattern, shape in TEXTS for key in shape.extras(1, torch.zeros)}
    return frozenset(given - extras - {"pooled_output"})


def read_by(model_class: type) -> frozenset[str]:
    """The texts in the methods that take whatever conditioning there is: keys among them."""
    return frozenset(
        text
        for one in model_class.__mro__
        for method in vars(one).values()
        if isinstance(method, FunctionType) and method.__code__.co_flags & inspect.CO_VARKEYWORDS
        for text in texts(method.__code__)
    )


def texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from texts(constant)
        elif isinstance(constant, str):
            yield constant


def model_classes() -> list[type]:
    found: list[type] = [comfy.model_base.BaseModel]
    for one in found:  # grows meanwhile
        found += [other for other in one.__subclasses__() if other not in found]
    return found
