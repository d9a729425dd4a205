"""Where a MODEL comes from, described in the UI and built again in a rank.

A source is either a stock factory with plain arguments, or a model configuration and a state dict
that go through shared memory.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import File, stat_file
from ..errors import Refused
from ..wire.tree import encode_tree, is_plain
from .forward import PREFIX
from .guard import refuse_state

CHECKPOINT_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a rank gets a model. Without a ``factory`` the UI sends its state dict."""

    model: str  # the identity: equal for equal sources
    factory: str = ""
    args: tuple = ()
    index: int | None = None
    file: File | None = None


def describe_source(patcher: Any) -> Source:
    """In the UI: the source of a stock MODEL. Raises ModelError when the checkpoint is gone,
    Refused for a model that no rank can rebuild.
    """
    init = patcher.cached_patcher_init
    if init is not None:
        factory, args = init[0], tuple(init[1])
        if factory.__module__.startswith("comfy.") and is_plain(list(args)):
            files = [arg for arg in args if isinstance(arg, str) and arg.lower().endswith(CHECKPOINT_SUFFIXES)]
            file = stat_file(files[0]) if files else None
            name, index = f"{factory.__module__}:{factory.__qualname__}", init[2] if len(init) > 2 else None
            identity = encode_tree([name, list(args), index, file and file[:3]], _no_tensor)  # some mounts number their files anew
            return Source(model=hashlib.blake2b(identity, digest_size=8).hexdigest(), factory=name, args=args, index=index, file=file)
    refuse_state(patcher)
    return Source(model=f"state-{patcher.clone_base_uuid.hex}")


def call_factory(name: str, args: tuple, index: int | None) -> Any:
    """In a rank: calls the stock loader that made the UI's model. Returns its ModelPatcher."""
    module, function = name.split(":")
    if not module.startswith("comfy."):
        raise Refused(f"The model's loader {name} is not ComfyUI's own: use a stock loader.")
    made = getattr(importlib.import_module(module), function)(*args)
    return made if index is None else made[index]


def find_here(path: str) -> str:
    """In a rank on another machine: the path of a model file of the UI's ComfyUI. It is the same
    path, or the same place in this ComfyUI's own models folder.
    """
    import comfy

    if os.path.exists(path):
        return path
    parts, root = Path(path).parts, Path(comfy.__path__[0]).parent
    places = [root.joinpath(*parts[index:]) for index, part in enumerate(parts) if part == "models"]
    return next((str(place) for place in places if place.exists()), path)


def state_source(patcher: Any) -> dict[str, Any]:
    """In the UI: the tree from which a rank builds a model without a factory."""
    config = patcher.model.model_config
    diffusion_model = patcher.model.diffusion_model
    weights = {**dict(diffusion_model.named_parameters()), **dict(diffusion_model.named_buffers())}
    state = {key: weights[key] for key in diffusion_model.state_dict()}
    for key, backup in patcher.backup.items():  # the stock path has patched these weights in place
        if key.startswith(PREFIX):
            state[key.removeprefix(PREFIX)] = backup.weight
    return {
        "config": type(config).__name__,
        "unet_config": dict(config.unet_config),
        "dtype": config.unet_config.get("dtype"),
        "manual_cast_dtype": config.manual_cast_dtype,
        "state": {key: tensor.detach() for key, tensor in state.items()},
    }


def build_from_state(source: dict[str, Any]) -> Any:
    """In a rank: a ModelPatcher from ``state_source``'s tree. Its tensors lie in shared memory."""
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


def _no_tensor(path: str, _tensor: Any) -> Any:
    raise TypeError(f"{path} is a tensor")
