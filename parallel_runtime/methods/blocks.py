"""Find a plan's blocks in a model, and the tokens among a block's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..families.plan import Blocks, TokenPlan
from ..refusals import ON_ONE_GPU


def blocks_of(model: nn.Module, plan: TokenPlan) -> Iterator[tuple[nn.ModuleList, int, Blocks]]:
    """Yield every block's container, its index there, and its part of the plan."""
    for group in plan.blocks:
        container = model.get_submodule(group.path)
        assert isinstance(container, nn.ModuleList)
        for index in range(len(container)):
            yield container, index, group


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class; for a stub, of the block it ``stands_for``."""
    return getattr(module, "stands_for", type(module)).forward


def entry_of(block: nn.Module, group: Blocks) -> Callable[..., Any]:
    """Return the method of a block's class that the model calls."""
    return getattr(getattr(block, "stands_for", type(block)), group.entry)


def taken(arguments: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return the argument of a plan's ``name``, which may be an element of a tuple."""
    name, _, place = name.partition(".")
    return arguments[name][int(place)] if place else arguments[name]


def as_BLC(tokens: torch.Tensor) -> torch.Tensor:
    """(L, C), (B, L, C) or (B, T, H, W, C) -> (B, L, C)."""
    return tokens.unsqueeze(0) if tokens.ndim == 2 else tokens.flatten(1, -2)


def as_given(tokens_BLC: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Invert ``as_BLC``. ``grid``: the dimensions between batch and channels; empty if there was no
    batch.
    """
    if not grid:
        return tokens_BLC[0]
    return tokens_BLC.unflatten(1, grid) if len(grid) > 1 else tokens_BLC


def put(arguments: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Set the argument that ``taken`` returns."""
    name, _, place = name.partition(".")
    if place:
        elements = list(arguments[name])
        elements[int(place)] = tensor
        arguments[name] = tuple(elements)
    else:
        arguments[name] = tensor


class EnteredBlocks:
    """The ``count`` of blocks of ``model`` that an evaluation has entered by their hooks."""

    def __init__(self, model: str):
        self._model = model
        self.count = 0
        self._most: dict[frozenset[str], int] = {}  # of this run, by the names of the arguments given

    def require_all(self, arguments: Mapping[str, Any]) -> None:
        """End an evaluation. Raises ModelError if another one of the run entered more: blocks
        that were recorded run without their hooks.
        """
        kind = frozenset(name for name, value in arguments.items() if value is not None)
        most = self._most[kind] = max(self.count, self._most.get(kind, 0))
        if self.count < most:
            raise ModelError(
                f"{most - self.count} of {most} blocks of {self._model} ran without the ranks' hooks, as"
                f" CUDA graphs do: start ComfyUI with --disable-cuda-graphs, or {ON_ONE_GPU}."
            )

    def forget(self) -> None:
        self._most.clear()
