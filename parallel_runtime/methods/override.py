"""Give an attention override to calls of ComfyUI's attention that pass no
``transformer_options``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

ATTENTION = ("optimized_attention", "optimized_attention_masked")  # the names that ComfyUI's models import


class Overridden:
    """One module whose forward sees the override until ``remove``.

    The forward is the module's own, with other names for attention around it: nothing changes for
    other modules of its class, nor for its file, which ComfyUI's process may share.
    """

    def __init__(self, module: nn.Module, override: Callable[..., Any]):
        own = type(module).forward
        names = {name: with_override(own.__globals__[name], override) for name in ATTENTION if name in own.__globals__}
        forward = FunctionType(own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        self._module = module
        self._module.forward = MethodType(forward, module)

    def remove(self) -> None:
        del self._module.forward


def with_override(attention: Callable[..., Any], override: Callable[..., Any]) -> Callable[..., Any]:
    options = {"optimized_attention_override": override}

    def call(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **{**kwargs, "transformer_options": options})

    return call
