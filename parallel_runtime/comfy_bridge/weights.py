"""Where a model's weights lie: the checkpoint's mapped pages in the UI, the rank's device in a
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..memory import give_back_freed
from .source import Source


def map_weights(patcher: Any, source: Source) -> int:
    """Points the UI's own unpatched CPU weights at the checkpoint's mapped pages; returns the
    private bytes given back.

    Only where file and model agree in dtype and shape, so that the stock path keeps computing the
    same.
    """
    model = patcher.model
    if source.file is None or not source.file[0].lower().endswith((".safetensors", ".sft")) or patcher.backup or patcher.is_dynamic():
        return 0
    import comfy.utils
    from comfy import model_detection

    state = comfy.utils.load_torch_file(source.file[0])
    prefix = model_detection.unet_prefix_from_state_dict(state)
    bare = comfy.utils.state_dict_prefix_replace(state, {prefix: ""}, filter_keys=True) or state
    mapped = model.model_config.process_unet_state_dict(bare)
    given_back = 0
    for name, parameter in model.diffusion_model.named_parameters():
        tensor = mapped.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
            continue
        if parameter.device.type == "cpu" and type(parameter.data) is torch.Tensor:
            parameter.data = tensor
            given_back += tensor.numel() * tensor.element_size()
    if given_back:
        give_back_freed()
    return given_back


def settle_weights(model: torch.nn.Module, device: torch.device, on_progress: Callable[[], None]) -> None:
    """Moves a rank's weights to its device, in the dtype that ComfyUI archived for the module.

    Weights that were assigned from a file still have the file's dtype.
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
