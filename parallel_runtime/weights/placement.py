"""The interface of the three ways to keep a model's weights on a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..forward import PREFIX
from .prefetch import Turns


class WeightPlacement:
    """The weights of one transformer on one rank. Names of parameters begin with
    ``diffusion_model.``.
    """

    turns: Turns | None = None  # gather a layer's weights before it computes; None: nothing to gather

    def __init__(self, diffusion_model: torch.nn.Module, device: torch.device):
        self._model = diffusion_model
        self._device = device

    @property
    def nbytes(self) -> int:
        """Bytes on the rank's device while the model computes."""
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        """Bytes of parameters that have a place on the device and no content yet: ``read`` brings
        it, which every rank that shares in it must call.
        """
        return 0

    def read(self, on_progress: Callable[[int], None]) -> None:
        """Raises Stopped if another rank has failed."""

    def has(self, name: str) -> bool:
        """Whether this rank has the parameter: a stage only has those of its own blocks."""
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
        """Takes all weight patches, and applies each when its weight is loaded or computes. Returns
        False if this way does not: then each weight must be patched and given to ``replace``.
        """
        return False

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or a flattened one, in the place of a parameter."""
        raise NotImplementedError

    def restore(self, but: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> None:
        """Puts every parameter back as it was loaded, and takes weight patches away, but for the
        parameters in ``but``, for which ``put_back`` follows. ``kept`` holds some loaded
        parameters, as ``aside`` returned them.
        """
        raise NotImplementedError

    def aside_bytes(self, name: str) -> int:
        raise NotImplementedError

    def aside(self, name: str, device: torch.device) -> Any:
        """Returns this rank's present content of a parameter, on ``device``, for ``put_back``."""
        raise NotImplementedError

    def put_back(self, name: str, aside: Any) -> None:
        """Puts the content that ``aside`` returned back into a parameter."""
        raise NotImplementedError

    def _slot(self, name: str) -> tuple[torch.nn.Module, str]:
        """Returns the module that has the parameter, and its name there."""
        path, _, attribute = name.removeprefix(PREFIX).rpartition(".")
        return self._model.get_submodule(path), attribute
