"""Methods of one class of ComfyUI's that auto mode stands before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...parallel_runtime.errors import PipeMeshError

Around = Callable[[Callable[..., Any]], Callable[..., Any]]  # the stock method -> what stands before it


class HostChanged(PipeMeshError):
    """ComfyUI computes in another way than auto mode knows."""


class Replaced:
    """Puts methods in and takes them out together. A method of ours that another pack has wrapped
    since stays in place when it is taken out: it has to call ComfyUI's then, by ``are_in``.
    """

    def __init__(self, owner: type, around: Mapping[str, Around]):
        self._owner = owner
        self._around = around
        self._stock: dict[str, Callable] = {}
        self._ours: dict[str, Callable] = {}

    @property
    def are_in(self) -> bool:
        return bool(self._ours)

    def put_in(self) -> None:
        if not self._ours:
            owner = self._owner
            self._stock = {name: vars(owner)[name] for name in self._around}
            self._ours = {name: around(self._stock[name]) for name, around in self._around.items()}
            for name, method in self._ours.items():
                setattr(owner, name, method)

    def take_out(self) -> None:
        for name, method in self._ours.items():
            if vars(self._owner)[name] is method:
                setattr(self._owner, name, self._stock[name])
        self._ours = {}


def require_uses(module: Any, needed: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises HostChanged, naming what differs, where a function of ComfyUI's ``module`` is not
    there, or does not use these names. Those that another pack has replaced are not looked into.
    """
    for path, names in needed:
        found: Any = module
        for part in path.split("."):
            found = vars(found).get(part)
            if found is None:
                raise changed(f"has no {module.__name__}.{path}")
        code = inspect.unwrap(found)
        if getattr(code, "__module__", None) == module.__name__:
            missing = [name for name in names if name not in code.__code__.co_names]
            if missing:
                raise changed(f"does not use {missing[0]} in {module.__name__}.{path}")


def changed(what: str) -> HostChanged:
    return HostChanged(
        f"Auto mode does not know this ComfyUI, which {what}: update PipeMesh, or put PipeMesh Parallelize"
        " into the graph."
    )
