"""What a rank needs of ComfyUI, and how the host must behave inside a rank: its arguments, its way
of loading weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import Refused


def prepare(comfyui: str, args: dict[str, Any]) -> None:
    """Before any other host module is imported: the device, dtypes and attention kernels are fixed
    at import.
    """
    sys.path.insert(0, comfyui)
    import comfy.cli_args as cli

    for name, value in args.items():
        if name == "fast":
            value = {cli.PerformanceFeature(item) for item in value}
        setattr(cli.args, name, value)
    import comfy.model_base
    import comfy.model_management

    # The file's mapped pages become the weights: one copy in the page cache for all ranks, instead
    # of one private copy each.
    stock_load = comfy.model_base.BaseModel.load_model_weights
    comfy.model_base.BaseModel.load_model_weights = lambda model, sd, prefix="", assign=False: stock_load(model, sd, prefix, assign=True)
    comfy.model_management.unet_inital_load_device = lambda parameters, dtype: torch.device("cpu")


def find_here(path: str) -> str:
    """A model file of ComfyUI's host as this host has it: at the same path, or at the same place in
    this ComfyUI's own models folder.
    """
    import comfy

    if os.path.exists(path):
        return path
    parts, root = Path(path).parts, Path(comfy.__path__[0]).parent
    places = [root.joinpath(*parts[index:]) for index, part in enumerate(parts) if part == "models"]
    return next((str(place) for place in places if place.exists()), path)


def call_factory(name: str, args: tuple, index: int | None) -> Any:
    """The stock loader that made the UI's model, called again here. Returns its ModelPatcher."""
    import importlib

    module, function = name.split(":")
    if not module.startswith("comfy."):
        raise Refused(f"The model's loader {name} is not ComfyUI's own: use a stock loader.")
    made = getattr(importlib.import_module(module), function)(*args)
    return made if index is None else made[index]


def build_from_state(source: dict[str, Any]) -> Any:
    """A ModelPatcher from a host model configuration and a state dict whose tensors lie in shared
    memory.
    """
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, source["config"])(source["unet_config"])
    config.unet_config.update(source["unet_config"])
    device = comfy.model_management.get_torch_device()
    config.set_inference_dtype(source["dtype"], source["manual_cast_dtype"])
    model = config.get_model(source["state"], "")
    model.load_model_weights(source["state"], "")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def settle_weights(model: torch.nn.Module, device: torch.device, on_progress: Callable[[], None]) -> None:
    """Moves weights to the rank's device. Assigned ones keep the file's dtype; the host wants the
    one it archived for the module.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            wanted = getattr(module, f"{name}_comfy_model_dtype", parameter.dtype)
            if type(parameter.data) is torch.Tensor and parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)
            parameter.data = parameter.data.to(device)
            on_progress()
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def rebuild_patches(patches: dict[str, list]) -> dict[str, list[tuple]]:
    """The inverse of ``client.host_model.plain_patches``."""
    import comfy.weight_adapter

    def value(kind: str, *content: Any) -> Any:
        if kind == "adapter":
            name, weights = content
            return getattr(comfy.weight_adapter, name)(set(), weights)
        if kind == "merge":
            weight, rest = content
            return [(weight, lambda tensor, **_: tensor), *(entry(item) for item in rest)]
        return content[0]

    def entry(item: list) -> tuple:
        strength, packed, strength_model, offset = item
        return (strength, value(*packed), strength_model, offset, None)

    return {key: [entry(item) for item in items] for key, items in patches.items()}
