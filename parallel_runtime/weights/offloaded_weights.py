"""Weights of which as many lie on the device as a budget allows. The rest stay on the file's pages,
and ComfyUI brings each to the device when its layer computes.

Read: comfy/model_patcher.py (load, unpatch_model, LowVramPatch), comfy/ops.py (cast_bias_weight) @
ComfyUI 0.30.0.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..forward import PREFIX
from .parameters import dotted, settled_as
from .placement import WeightPlacement
from .quantisation import put_together


class OffloadedWeights(WeightPlacement):
    """Weights under ComfyUI's own partial loading: ``patcher`` loads into ``budget`` bytes, and
    applies weight patches as it loads, or as a layer computes.
    """

    def __init__(self, patcher: Any, device: torch.device, budget: int, on_progress: Callable[[int], None]):
        super().__init__(patcher.model.diffusion_model, device)
        self._patcher = patcher
        self._budget = budget
        self._on_progress = on_progress
        self._loaded: dict[str, torch.nn.Parameter] = {}  # as the loader made them, on the file's pages
        self._replaced: dict[str, torch.nn.Parameter] = {}
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._loaded[PREFIX + dotted(path, name)] = settled_as(module, name, parameter)
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = buffer.to(device)
            on_progress(0)
        self._unload()
        self._load()

    def _unload(self) -> None:
        """Takes everything off the device; it is still where it was loaded from."""
        self._patcher.unpatch_model(None, unpatch_weights=True)
        for name, parameter in (*self._loaded.items(), *self._replaced.items()):
            setattr(*self._slot(name), parameter)

    def _load(self) -> None:
        """Loads no more than the budget, in which weights count that come while a layer
        computes.
        """
        self._patcher.patches_uuid = uuid.uuid4()
        self._patcher.load(self._device, lowvram_model_memory=max(1, self._budget))
        self._on_progress(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded weights, and of the buffer for weights that come while a layer
        computes.
        """
        model = self._patcher.model
        return int(model.model_loaded_weight_memory + model.model_offload_buffer_memory)

    def applies(self, patches: dict[str, list]) -> bool:
        self._unload()
        self._patcher.patches = patches
        self._load()
        return True

    def replace(self, name: str, weight: Any) -> None:
        """Replaces the parameter in the machine's memory; ``applies`` follows."""
        replaced = put_together(weight, self._loaded[name])
        self._replaced[name] = torch.nn.Parameter(replaced, requires_grad=False)

    def restore(self, but: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> None:
        self._replaced.clear()
        self._unload()
        self._patcher.patches = {}
