"""Where a model's weights lie on a rank: what the three ways to keep them have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..forward import PREFIX
from .prefetch import Turns


class WeightPlacement:
    """The weights of one transformer on one rank. Names of parameters begin with
    ``diffusion_model.``, as those of weight patches do.
    """

    def __init__(self, diffusion_model: torch.nn.Module, device: torch.device):
        self._model = diffusion_model
        self._device = device

    @property
    def turns(self) -> Turns | None:
        """Gathers a layer's weights before the layer computes; None: nothing to gather."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes on the rank's device while the model computes."""
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        """Bytes of parameters that have a place on the device and no content yet: ``read`` brings
        it, and every rank that shares in it must call that.
        """
        return 0

    def read(self, on_progress: Callable[[int], None]) -> None:
        """Raises Stopped where another rank has failed."""

    def has(self, name: str) -> bool:
        """Whether this rank has the parameter: a stage has those of its own blocks alone."""
        try:
            module, attribute = self._slot(name)
        except AttributeError:
            return False
        return module._parameters.get(attribute) is not None

    def get(self, name: str) -> torch.Tensor:
        """The parameter as it is now, whole."""
        return getattr(*self._slot(name))

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """Inside, the model itself has the parameter, for ComfyUI to patch."""
        yield

    def applies(self, patches: dict[str, list]) -> bool:
        """Takes all weight patches, and applies each where its weight is loaded or computes. False:
        does not, so each weight is to be patched and given to ``replace``.
        """
        return False

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or one that was taken apart, in the place of a parameter."""
        raise NotImplementedError

    def restore(self, but: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> None:
        """Puts every parameter back as it was loaded, and takes weight patches away; ``but`` those
        that ``put_back`` follows for. ``kept``: some as they were loaded, as ``aside`` gave them.
        """
        raise NotImplementedError

    def aside_bytes(self, name: str) -> int:
        """Returns the bytes of what ``aside`` gives."""
        raise NotImplementedError

    def aside(self, name: str, device: torch.device) -> Any:
        """Returns what this rank has of a parameter now, on ``device``, for ``put_back``."""
        raise NotImplementedError

    def put_back(self, name: str, aside: Any) -> None:
        """Puts into a parameter's place what ``aside`` gave."""
        raise NotImplementedError

    def _slot(self, name: str) -> tuple[torch.nn.Module, str]:
        """Returns the module that has the parameter, and its name there."""
        path, _, attribute = name.removeprefix(PREFIX).rpartition(".")
        return self._model.get_submodule(path), attribute
