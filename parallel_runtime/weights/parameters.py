"""Names, modules and dtypes of a model's parameters."""

from __future__ import annotations

from collections import Counter

import torch


def settled_dtype(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.dtype:
    is_plain = type(parameter) is torch.nn.Parameter  # the bytes of others are not numbers in their dtype
    return getattr(module, f"{name}_comfy_model_dtype", parameter.dtype) if is_plain else parameter.dtype


def settled_as(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter, device: torch.device | None = None
) -> torch.nn.Parameter:
    """Returns the parameter in the dtype that ComfyUI archived for it, on ``device`` if given; the
    same parameter if nothing changes, else a new one, because the inner tensors of a quantised
    weight cannot be swapped for tensors of another device.
    """
    # One after the other: with a device beside the dtype a quantised one gives up its small numbers
    settled = parameter.to(dtype=settled_dtype(module, name, parameter)).to(device or parameter.device)
    return parameter if settled is parameter else torch.nn.Parameter(settled, requires_grad=False)


def dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def users_of(model: torch.nn.Module) -> Counter[int]:
    """Counts the modules that have each parameter and buffer, by its id."""
    return Counter(
        id(tensor)
        for module in model.modules()
        for slot in (module._parameters, module._buffers)
        for tensor in slot.values()
    )
