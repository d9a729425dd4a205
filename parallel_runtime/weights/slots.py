"""The tensors of a transformer, under their names in a state dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .gguf import is_ggml
from .parameters import dotted
from .quantisation import is_quantised, named_tensors


class WeightSlot(NamedTuple):
    """A parameter or buffer, or a tensor that a quantised one is stored as, under its name in a
    state dict. ``owner``: the name of the parameter or buffer; ``holder``: a quantised one, or one
    of a GGUF file. ``archived``: the dtype that ComfyUI gave it.
    """

    name: str
    tensor: torch.Tensor
    archived: torch.dtype
    owner: str
    holder: Any = None


def slots(diffusion_model: torch.nn.Module) -> Iterator[WeightSlot]:
    for path, module in diffusion_model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            owner = dotted(path, name)
            if is_quantised(tensor):
                for stored, inner in named_tensors(owner, tensor).items():
                    if not inner.is_meta:
                        yield WeightSlot(stored, inner, inner.dtype, owner, tensor)
            elif is_ggml(tensor):
                yield WeightSlot(owner, tensor.as_subclass(torch.Tensor), tensor.dtype, owner, tensor)
            elif type(tensor.data) is torch.Tensor and not tensor.is_meta:
                archived = vars(module).get(f"{name}_comfy_model_dtype") or tensor.dtype
                yield WeightSlot(owner, tensor, archived, owner)
