"""Where a model's weights lie on a rank: a request names one of three ways to keep them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..comm.shard_gather import ShardGather
from .device_weights import DeviceWeights
from .offloaded_weights import OffloadedWeights
from .sharded_weights import ShardedWeights
from .turns import Turns


class Placement(Protocol):
    """The weights of one transformer on one rank. Names of parameters begin with
    ``diffusion_model.``, as those of weight patches do.
    """

    @property
    def turns(self) -> Turns | None:
        """Gathers a layer's weights before the layer computes; None: nothing to gather."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes on the rank's device while the model computes."""
        ...

    def has(self, name: str) -> bool:
        """Whether this rank has the parameter: a stage has those of its own blocks alone."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The parameter as it is now, whole."""
        ...

    def in_place(self, name: str) -> AbstractContextManager[None]:
        """Inside, the model itself has the parameter, for ComfyUI to patch."""
        ...

    def applies(self, patches: dict[str, list]) -> bool:
        """Takes all weight patches, and applies each where its weight is loaded or computes. False:
        does not, so each weight is to be patched and given to ``replace``.
        """
        ...

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or one that was taken apart, in the place of a parameter."""
        ...

    def restore(self) -> None:
        """Puts every parameter back as it was loaded, and takes weight patches away."""
        ...


def placed(
    kept: str,
    patcher: Any,
    device: torch.device,
    gather: ShardGather | None,
    budget: int,
    on_progress: Callable[[int], None],
) -> Placement:
    """Brings the weights of the patcher's transformer to where ``kept``, of a ``Load``, wants them.
    ``gather`` joins the ranks of one sequence; without it, sharded weights are whole. ``budget``:
    bytes on the device of offloaded ones. ``on_progress`` is told the bytes of what is there.

    Every rank of a sequence must call it for sharded weights.
    """
    if kept == "offloaded":
        return OffloadedWeights(patcher, device, budget, on_progress)
    model = patcher.model.diffusion_model
    if kept == "sharded" and gather is not None:
        return ShardedWeights(model, device, gather, on_progress)
    return DeviceWeights(model, device, on_progress)
