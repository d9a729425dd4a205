"""Stand in for ComfyUI's attention: as its override, and in calls that pass no
``transformer_options``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ModelError

Attention = Callable[..., torch.Tensor]
Shared = bool | Literal["keys"]

ATTENTION = ("optimized_attention", "optimized_attention_masked")  # the names that ComfyUI's models import


# What an attention of ComfyUI takes behind its mask
BY_POSITION = ("attn_precision", "skip_reshape", "skip_output_reshape")


def by_name(args: tuple) -> dict[str, Any]:
    """The arguments that an attention is given by position behind its mask. Raises ModelError for
    more than there are names.
    """
    if len(args) > len(BY_POSITION):
        raise ModelError(
            f"Attention is given {len(args)} arguments by position behind its mask, where {len(BY_POSITION)}"
            f" are known ({', '.join(BY_POSITION)}): this model needs another plan."
        )
    return dict(zip(BY_POSITION, args, strict=False))


class AttentionOverride:
    """ComfyUI's ``optimized_attention_override`` of one attached model; ``attend`` computes while a
    run is open.

    ``shared``: what of an attention is shared with other ranks: all of it, the keys that whole
    queries look at, or nothing. ``options``: the evaluation's ``transformer_options``. ``opaque``:
    what stands for ``attend`` in graphs of ``torch.compile``.
    """

    def __init__(self) -> None:
        self.attend: Attention | None = None  # of the hooks, which hold this
        self.shared: Shared = False
        self.options: dict[str, Any] = {}
        self.opaque: Attention | None = None

    def share(self, shared: Shared) -> None:
        self.shared = shared

    def __call__(self, attention: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.opaque is not None and torch.compiler.is_compiling():
            return self.opaque(attention, *args, **kwargs)
        assert self.attend is not None
        return self.attend(attention, *args, **kwargs)

    def close(self) -> None:
        """Free what the run needed."""
        self.attend, self.options = None, {}


class Overridden:
    """One module whose forward sees the override until ``remove``.

    The forward is the module's own, with other names for attention around it: nothing changes for
    other modules of its class, nor for its file, which ComfyUI's process may share.
    """

    def __init__(self, module: nn.Module, override: Callable[..., Any]):
        own = type(module).forward
        names = {
            name: with_override(own.__globals__[name], override)
            for name in ATTENTION
            if name in own.__globals__
        }
        around = {**own.__globals__, **names}
        del around["__name__"]  # by which torch.compile would look the names up in the module itself
        forward = FunctionType(own.__code__, around, own.__name__, own.__defaults__, own.__closure__)
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
