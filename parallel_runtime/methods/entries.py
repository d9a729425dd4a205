"""Hook a method of a module that is not its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class MethodHook:
    """A method of one module with a hook before it and one behind it, as torch's of a forward are,
    until ``remove``.
    """

    def __init__(self, module: nn.Module, name: str, before: Callable, behind: Callable):
        own = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = before(module, args, kwargs)
            out = own(*args, **kwargs)
            changed = behind(module, args, out)
            return out if changed is None else changed

        self._module, self._name = module, name
        setattr(module, name, call)

    def remove(self) -> None:
        delattr(self._module, self._name)
