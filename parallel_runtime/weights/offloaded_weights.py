"""Weights of which as many lie on the device as a budget allows. The rest stay on the file's pages
in the machine's memory, and ComfyUI brings each to the device when its layer computes.

Read: comfy/model_patcher.py (load, unpatch_model, LowVramPatch), comfy/ops.py (cast_bias_weight) @
ComfyUI 0.30.0.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..forward import PREFIX
from .device_weights import has_parameter, settled_as, slot_of
from .quantised import put_together


class OffloadedWeights:
    """As ``DeviceWeights``, for ComfyUI's own partial loading: ``patcher`` loads into ``budget``
    bytes, and applies weight patches as it loads, or as a layer computes.
    """

    turns: Any = None  # every layer brings its own weights

    def __init__(self, patcher: Any, device: torch.device, budget: int, on_progress: Callable[[int], None]):
        self._patcher = patcher
        self._model = patcher.model.diffusion_model
        self._device = device
        self._budget = budget
        self._on_progress = on_progress
        self._loaded: dict[str, torch.nn.Parameter] = {}  # as the loader made them, on the file's pages
        self._replaced: dict[str, torch.nn.Parameter] = {}
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._loaded[f"{path}.{name}" if path else name] = settled_as(module, name, parameter)
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = buffer.to(device)
            on_progress(0)
        self._unload()
        self._load()

    def _unload(self) -> None:
        """Takes everything off the device. Nothing is copied back: it is still where it was loaded
        from.
        """
        self._patcher.unpatch_model(None, unpatch_weights=True)
        for name, parameter in (*self._loaded.items(), *self._replaced.items()):
            module, attribute = slot_of(self._model, name)
            setattr(module, attribute, parameter)

    def _load(self) -> None:
        """Never more than the budget: what it has no room for when a layer computes counts too."""
        self._patcher.patches_uuid = uuid.uuid4()
        self._patcher.load(self._device, lowvram_model_memory=max(1, self._budget))
        self._on_progress(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device: of what is loaded, and of what is brought while a layer computes."""
        model = self._patcher.model
        return int(model.model_loaded_weight_memory + model.model_offload_buffer_memory)

    def has(self, name: str) -> bool:
        return has_parameter(self._model, name)

    def get(self, name: str) -> torch.nn.Parameter:
        module, attribute = slot_of(self._model, name)
        return getattr(module, attribute)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        yield

    def applies(self, patches: dict[str, list]) -> bool:
        """Has ComfyUI apply these weight patches, in place of earlier ones."""
        self._unload()
        self._patcher.patches = patches
        self._load()
        return True

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or one that was taken apart, in the place of a parameter, in the machine's
        memory. ``applies`` follows.
        """
        loaded = self._loaded[name.removeprefix(PREFIX)]
        self._replaced[name.removeprefix(PREFIX)] = torch.nn.Parameter(
            put_together(weight, loaded), requires_grad=False
        )

    def restore(self) -> None:
        """Takes all weight patches away, and puts every parameter back as it was loaded."""
        self._replaced.clear()
        self._unload()
        self._patcher.patches = {}
