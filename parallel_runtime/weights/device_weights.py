"""A rank's weights on its device, and the way back from patched ones.

Read: comfy/ops.py (_quantized_apply), comfy/model_management.py (archive_model_dtypes) @ ComfyUI
0.30.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from ..forward import PREFIX
from ..memory import is_unwritten
from .quantised import put_together, stored_bytes, stored_tensors


class DeviceWeights:
    """The transformer's parameters on a rank's device, in the dtype that ComfyUI archived for each:
    those assigned from a file still have the file's.

    What a parameter was loaded from is kept where it is a file's mapped pages, which cost no
    memory. So nothing stays on the device beside a patched weight, and taking the patch away reads
    the file's pages again. Names begin with ``diffusion_model.``, as those of weight patches do.
    """

    turns: Any = None  # every block has its weights at all times

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
        self._model = diffusion_model
        self._apart = apart
        self._device = device
        self._loaded: dict[str, torch.nn.Parameter] = {}
        self._replaced: dict[str, torch.nn.Parameter] = {}
        uses = Counter(
            id(parameter)
            for module in diffusion_model.modules()
            for parameter in module.parameters(recurse=False)
        )
        # With the old one, so that its id stays its own
        shared: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for path, module in diffusion_model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if (f"{path}.{name}" if path else name) in apart:
                    continue
                settled = (
                    shared[id(parameter)][1]
                    if id(parameter) in shared
                    else self._settled(module, name, parameter)
                )
                if uses[id(parameter)] > 1:
                    shared[id(parameter)] = parameter, settled
                if settled is not parameter:
                    setattr(module, name, settled)
                    if is_mapped(parameter):
                        self._loaded[PREFIX + (f"{path}.{name}" if path else name)] = parameter
                on_progress(stored_bytes([parameter]))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if (f"{path}.{name}" if path else name) not in apart:
                    # Not by setattr: a model may register a Parameter as one
                    module._buffers[name] = buffer.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        every = chain(self._model.named_parameters(), self._model.named_buffers())
        return stored_bytes([tensor for name, tensor in every if name not in self._apart])

    def has(self, name: str) -> bool:
        """Whether this rank has the parameter: a stage has those of its own blocks alone."""
        return has_parameter(self._model, name)

    def get(self, name: str) -> torch.nn.Parameter:
        module, attribute = self._slot(name)
        return getattr(module, attribute)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """The model has the parameter inside, for the host to patch: it always has."""
        yield

    def applies(self, patches: dict[str, list]) -> bool:
        return False

    def replace(self, name: str, weight: Any) -> None:
        """Puts a weight, or one that was taken apart, in the place of a parameter."""
        module, attribute = self._slot(name)
        before = getattr(module, attribute)
        if name not in self._replaced:
            self._replaced[name] = (
                self._loaded[name] if name in self._loaded else away_from(before, self._device)
            )
        weight = put_together(weight, before).to(self._device)
        setattr(module, attribute, torch.nn.Parameter(weight, requires_grad=False))

    def restore(self) -> None:
        """Puts every parameter back as it was loaded."""
        while self._replaced:
            name, loaded = self._replaced.popitem()
            module, attribute = self._slot(name)
            setattr(module, attribute, self._settled(module, attribute, loaded))

    def _slot(self, name: str) -> tuple[torch.nn.Module, str]:
        return slot_of(self._model, name)

    def _settled(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        """The parameter on the device: itself where it is there, else a new one, because what a
        quantised one holds cannot be swapped for tensors of another device.
        """
        cast = settled_as(module, name, parameter)
        settled = cast.to(self._device)
        return cast if settled is cast else torch.nn.Parameter(settled, requires_grad=False)


def slot_of(diffusion_model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has the parameter, and its name there."""
    path, _, attribute = name.removeprefix(PREFIX).rpartition(".")
    return diffusion_model.get_submodule(path), attribute


def has_parameter(diffusion_model: torch.nn.Module, name: str) -> bool:
    try:
        module, attribute = slot_of(diffusion_model, name)
    except AttributeError:
        return False
    return module._parameters.get(attribute) is not None


def settled_as(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter in the dtype that ComfyUI archived for it: itself where it has that."""
    is_plain = type(parameter) is torch.nn.Parameter  # the bytes of others are not numbers in their dtype
    wanted = getattr(module, f"{name}_comfy_model_dtype", parameter.dtype) if is_plain else parameter.dtype
    settled = parameter.to(dtype=wanted)
    return parameter if settled is parameter else torch.nn.Parameter(settled, requires_grad=False)


def is_mapped(parameter: torch.Tensor) -> bool:
    """True if it lies on pages of a file that nobody wrote to."""
    tensors = stored_tensors(parameter)
    # A scale is a few bytes, and may be a tensor of its own
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    return (
        largest.device.type == "cpu"
        and largest.nbytes > 0
        and is_unwritten(largest.data_ptr(), largest.nbytes)
    )


def away_from(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """A copy in the machine's memory; itself where the device is the CPU."""
    if device.type == "cpu":
        return parameter
    return torch.nn.Parameter(parameter.to("cpu"), requires_grad=False)
