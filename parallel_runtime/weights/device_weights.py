"""A rank's weights on its device, and the way back from patched ones.

Read: comfy/ops.py (_quantized_apply), comfy/model_management.py (archive_model_dtypes) @ ComfyUI
0.30.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import torch

from ..comm.readers import LEAST_BYTES, Readers
from ..forward import PREFIX
from ..memory import is_unwritten
from .parameters import dotted, settled_as, settled_dtype, users_of
from .placement import WeightPlacement
from .quantisation import put_together, stored_bytes, stored_parts, stored_tensors, taken_apart, with_tensors
from .shared_layers import is_number

CPU = torch.device("cpu")


class DeviceWeights(WeightPlacement):
    """The transformer's parameters on a rank's device, in the dtype that ComfyUI archived for each:
    parameters assigned from a file still have the file's dtype.

    A loaded tensor is kept if it lies on mapped pages of a file, which cost no memory: taking a
    patch away reads these again, and no copy stays on the device beside a patched weight.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        device: torch.device,
        on_progress: Callable[[int], None],
        apart: Collection[str] = (),
        readers: Readers | None = None,
    ):
        """``on_progress`` is told the bytes of each parameter that is there; ``apart``: names of
        parameters and buffers that are left as they are. ``readers``: with whom ``read`` brings
        what is large.
        """
        super().__init__(diffusion_model, device)
        self._apart = apart
        self._readers = readers if device.type != "cpu" else None
        self._unread: list[tuple[torch.Tensor, torch.Tensor]] = []  # a place on the device, and its source
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
                    unread, settled = self.unread_bytes, self._placed(module, name, parameter)
                    on_progress(stored_bytes([parameter]) if self.unread_bytes == unread else 0)
                if users[id(parameter)] > 1:
                    shared[id(parameter)] = parameter, settled
                if settled is not parameter:
                    setattr(module, name, settled)
                    if is_mapped(parameter):
                        self._loaded[PREFIX + dotted(path, name)] = parameter
            for name, buffer in list(module.named_buffers(recurse=False)):
                if dotted(path, name) not in apart:
                    # Not by setattr: a model may register a Parameter as one
                    module._buffers[name] = buffer.to(device)

    @property
    def nbytes(self) -> int:
        every = chain(self._model.named_parameters(), self._model.named_buffers())
        return stored_bytes([tensor for name, tensor in every if name not in self._apart])

    @property
    def unread_bytes(self) -> int:
        return sum(place.nbytes for place, _ in self._unread)

    def read(self, on_progress: Callable[[int], None]) -> None:
        if self._readers is not None and self._unread:
            self._readers.read(self._unread, on_progress)
            self._unread = []

    def replace(self, name: str, weight: Any) -> None:
        whole = put_together(weight, self.get(name)).to(self._device)
        self._put(name, torch.nn.Parameter(whole, requires_grad=False))

    def _put(self, name: str, parameter: torch.nn.Parameter) -> None:
        module, attribute = self._slot(name)
        if name not in self._replaced:
            on_file = self._loaded.get(name)
            before = getattr(module, attribute)
            self._replaced[name] = (
                on_file if on_file is not None else settled_as(module, attribute, before, CPU)
            )
        setattr(module, attribute, parameter)

    def restore(self, but: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> None:
        here = {} if kept is None else kept
        for name in [name for name in self._replaced if name not in but]:
            module, attribute = self._slot(name)
            loaded = self._replaced.pop(name)
            if name in here:
                self._loaded[name] = loaded  # it will be replaced again
            settled = here[name] if name in here else settled_as(module, attribute, loaded, self._device)
            setattr(module, attribute, settled)

    def aside_bytes(self, name: str) -> int:
        return stored_bytes([self.get(name)])

    def aside(self, name: str, device: torch.device) -> torch.nn.Parameter:
        return parameter_on(self.get(name), device)

    def put_back(self, name: str, aside: torch.nn.Parameter) -> None:
        self._put(name, parameter_on(aside, self._device))

    def _placed(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        """Returns the parameter on the device. With ``readers``, a large one only gets its memory
        here.
        """
        if self._readers is None or not is_number(parameter):
            return settled_as(module, name, parameter, self._device)
        tree, dtype = taken_apart(parameter), settled_dtype(module, name, parameter)
        places = {}
        for key, tensor in stored_parts(tree).items():
            wanted = dtype if tree is tensor else tensor.dtype
            if tensor.nbytes < LEAST_BYTES or tensor.device.type != "cpu" or not tensor.is_contiguous():
                places[key] = tensor.to(self._device, wanted)
                continue
            places[key] = torch.empty(tensor.shape, dtype=wanted, device=self._device)
            self._unread.append((places[key], tensor))
        placed = put_together(with_tensors(tree, places), parameter)
        return torch.nn.Parameter(placed, requires_grad=False)


def parameter_on(parameter: Any, device: torch.device) -> torch.nn.Parameter:
    """Returns the parameter itself if it is there already."""
    moved = parameter.to(device)
    return parameter if moved is parameter else torch.nn.Parameter(moved.detach(), requires_grad=False)


def is_mapped(parameter: torch.Tensor) -> bool:
    """True if it lies on pages of a file that nobody wrote to."""
    # A scale is a few bytes, and may be a tensor of its own
    largest = max(stored_tensors(parameter), key=lambda tensor: tensor.nbytes)
    is_here = largest.device.type == "cpu" and largest.nbytes > 0
    return is_here and is_unwritten(largest.data_ptr(), largest.nbytes)
