"""A rank's weights on its device, and the way back from patched ones.

Read: comfy/ops.py (_quantized_apply), comfy/model_management.py (archive_model_dtypes) @ ComfyUI
0.30.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch

from ..forward import PREFIX
from ..memory import is_unwritten
from .placement import Placement, dotted, settled_as, users_of
from .quantised import put_together, stored_bytes, stored_tensors


class DeviceWeights(Placement):
    """The transformer's parameters on a rank's device, in the dtype that ComfyUI archived for each:
    those assigned from a file still have the file's.

    What a parameter was loaded from is kept where it is a file's mapped pages, which cost no
    memory. So nothing stays on the device beside a patched weight, and taking the patch away reads
    the file's pages again.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        device: torch.device,
        on_progress: Callable[[int], None],
        apart: Collection[str] = (),
    ):
        """``on_progress`` is told the bytes of each parameter that is there; ``apart``: parameters
        and buffers that are left as they are, by their names in the model.
        """
        super().__init__(diffusion_model, device)
        self._apart = apart
        self._loaded: dict[str, torch.nn.Parameter] = {}
        self._replaced: dict[str, torch.nn.Parameter] = {}
        users = users_of(diffusion_model)
        # With the old one, so that its id stays its own
        shared: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for path, module in diffusion_model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if dotted(path, name) in apart:
                    continue
                if id(parameter) in shared:
                    settled = shared[id(parameter)][1]
                else:
                    settled = self._settled(module, name, parameter)
                if users[id(parameter)] > 1:
                    shared[id(parameter)] = parameter, settled
                if settled is not parameter:
                    setattr(module, name, settled)
                    if is_mapped(parameter):
                        self._loaded[PREFIX + dotted(path, name)] = parameter
                on_progress(stored_bytes([parameter]))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if dotted(path, name) not in apart:
                    # Not by setattr: a model may register a Parameter as one
                    module._buffers[name] = buffer.to(device)

    @property
    def nbytes(self) -> int:
        every = chain(self._model.named_parameters(), self._model.named_buffers())
        return stored_bytes([tensor for name, tensor in every if name not in self._apart])

    def replace(self, name: str, weight: Any) -> None:
        module, attribute = self._slot(name)
        before = getattr(module, attribute)
        if name not in self._replaced:
            self._replaced[name] = self._loaded[name] if name in self._loaded else in_memory(before)
        weight = put_together(weight, before).to(self._device)
        setattr(module, attribute, torch.nn.Parameter(weight, requires_grad=False))

    def restore(self) -> None:
        while self._replaced:
            name, loaded = self._replaced.popitem()
            module, attribute = self._slot(name)
            setattr(module, attribute, self._settled(module, attribute, loaded))

    def _settled(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        """The parameter on the device: itself where it is there, else a new one, because what a
        quantised one holds cannot be swapped for tensors of another device.
        """
        cast = settled_as(module, name, parameter)
        settled = cast.to(self._device)
        return cast if settled is cast else torch.nn.Parameter(settled, requires_grad=False)


def is_mapped(parameter: torch.Tensor) -> bool:
    """True if it lies on pages of a file that nobody wrote to."""
    # A scale is a few bytes, and may be a tensor of its own
    largest = max(stored_tensors(parameter), key=lambda tensor: tensor.nbytes)
    is_here = largest.device.type == "cpu" and largest.nbytes > 0
    return is_here and is_unwritten(largest.data_ptr(), largest.nbytes)


def in_memory(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns a copy in the machine's memory; itself where it is there."""
    if parameter.device.type == "cpu":
        return parameter
    return torch.nn.Parameter(parameter.to("cpu"), requires_grad=False)
