"""A MODEL object that is sampled in the place of another, which nodes hold and go on to use: stock
ComfyUI has one object, on which a node may keep values that its sampler reads or leaves there.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from ..errors import Refused
from ..refusals import patch_name

# Methods that ComfyUI and nodes call of a MODEL whoever computes it, by how their names begin;
# others load weights and run hooks, which ranks do
HONOURED = ("add_", "apply_hooks", "get_", "is_", "memory_", "model_", "prepare_", "remove_", "set_")


class Instead:
    """Shares attributes with the object that it is ``instead_of``: an attribute that a node sets,
    changes or deletes on one of the two changes on both. Excepted are ComfyUI's own fields, but not
    a node's attachments among them, and methods, which stay as they were when this object was made.
    """

    instead_of: Any = None

    def __getattr__(self, name: str) -> Any:
        """Is called for an attribute that neither the object nor its class has. Attributes that the
        other object's class has of its own, such as ModelPatcherDynamic's methods, are not found.
        """
        first = first_of(self)
        if first is self or name not in vars(first):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return rebound(vars(first)[name], self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.instead_of is None or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.instead_of, name, value)

    def __delattr__(self, name: str) -> None:
        is_here, of = name in vars(self), self.instead_of
        if is_here or of is None:
            super().__delattr__(name)
        if of is not None and (not is_here or (is_method(self, name) and name in vars(of))):
            delattr(of, name)


def take_place(made: Instead, of: Any) -> None:
    """Has ``made`` stand in the place of the MODEL ``of``, with the methods that a node has
    replaced on that object. Raises Refused for a method that the pool replaces too, or that it does
    not call.
    """
    made.instead_of = of  # by which ``rebound`` knows whose methods they are
    for name, value in vars(of).items():
        if not is_method(made, name):
            continue
        if name in vars(type(made)) or not name.startswith(HONOURED):
            raise Refused(
                f"A node has put {patch_name(value)} in the place of this MODEL's method {name}, which the"
                " pool does not call: remove that node, or bypass PipeMesh Parallelize."
            )
        vars(made)[name] = rebound(value, made)
    vars(made)["attachments"] = of.attachments


def is_method(one: Any, name: str) -> bool:
    return isinstance(getattr(type(one), name, None), FunctionType)


def rebound(value: Any, to: Instead) -> Any:
    """Returns a method of the replaced object bound to its substitute, other values as they are."""
    if isinstance(value, MethodType) and first_of(value.__self__) is first_of(to):
        return MethodType(value.__func__, to)
    return value


def first_of(one: Any) -> Any:
    """Returns the first object of a chain of substitutes: the one in whose place all others
    stand.
    """
    while isinstance(one, Instead) and one.instead_of is not None:
        one = one.instead_of
    return one
