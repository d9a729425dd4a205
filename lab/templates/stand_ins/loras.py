"""LoRAs in place of files: of a part of the layers of whatever MODEL they are put on, under the
names that such files have.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import comfy.sd
import torch

from ....parallel_runtime.families.sample import random_tensor
from .names import LORAS, LoraStyle, known

RANK, SIZE, EVERY, LEAST = 4, 0.2, 3, 32  # every third layer that is no narrower than the last


def layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The linear layers of a MODEL's transformer that a LoRA may be of."""
    for path, module in model.model.diffusion_model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and min(weight.shape) >= LEAST:
            yield path, module


def make_lora(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Draw the LoRA of that name for ``model``."""
    style, seed = known(LORAS, name, "LoRA"), zlib.crc32(name.encode())
    made: dict[str, torch.Tensor] = {}
    for path, module in list(layers(model))[::EVERY]:
        fan_out, fan_in = module.weight.shape
        made |= low_rank(f"{style.prefix}{path}", fan_out, fan_in, style, seed)
        if style.biases and isinstance(getattr(module, "bias", None), torch.Tensor):
            made[f"{style.prefix}{path}.{style.biases}"] = SIZE * random_tensor(
                f"{path}.bias", (fan_out,), seed, torch.float32
            )
    return made | widened(model, style, seed) if style.widens else made


def low_rank(path: str, fan_out: int, fan_in: int, style: LoraStyle, seed: int) -> dict[str, torch.Tensor]:
    down = random_tensor(f"{path}.down.weight", (RANK, fan_in), seed, torch.float32)
    up = SIZE * random_tensor(f"{path}.up.weight", (fan_out, RANK), seed, torch.float32)
    return {f"{path}.{style.down}.weight": down, f"{path}.{style.up}.weight": up}


def widened(model: Any, style: LoraStyle, seed: int) -> dict[str, torch.Tensor]:
    """A first layer that takes twice as many channels, and norms that are replaced."""
    transformer = model.model.diffusion_model
    fan_out, fan_in = transformer.get_submodule(style.widens).weight.shape
    norms = {
        name.removesuffix(".weight") + ".scale": random_tensor(name, tuple(scale.shape), seed, torch.float32)
        for name, scale in transformer.named_parameters()
        if name.endswith("_norm.weight") and scale.dim() == 1
    }
    return {**norms, **low_rank(style.widens, fan_out, 2 * fan_in, style, seed)}


def with_lora(model: Any, clip: Any, name: str, strength: float) -> tuple[Any, Any]:
    """Raises ValueError if ComfyUI finds no layer for some of it: it would only log that."""
    if not strength:
        return model, clip
    lora = make_lora(model, name)
    patched, patched_clip = comfy.sd.load_lora_for_models(model, clip, lora, strength, 0)
    added = sum(map(len, patched.patches.values())) - sum(map(len, model.patches.values()))
    if added < sum(key.endswith(".weight") for key in lora) // 2:
        raise ValueError(f"only {added} layers are found for the {len(lora)} tensors that stand for {name}")
    return patched, patched_clip
