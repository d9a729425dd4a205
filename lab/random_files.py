"""Random model files and LoRAs that ComfyUI's own loaders accept, for the tests and the benches.

A file is written tensor by tensor, so its size is bounded by the disk, not by memory. Its weights
are those of ``Form.random_model`` of the same size and seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ..parallel_runtime.families.sample import random_tensor

if TYPE_CHECKING:
    from ..parallel_runtime.families.sample import Form, Shapes, Size

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_model(
    path: str | Path, form: Form, size: Size, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write a model for UNETLoader. Raises ValueError if no file can have that size."""
    if form.file is None:
        raise ValueError(f"no file form is known for {form.config_class}")
    if size.head_dim != form.file.head_dim:
        raise ValueError(
            f"heads of {size.head_dim}, but ComfyUI reads a file's heads as {form.file.head_dim} wide"
        )
    if form.file.text_dim not in (0, size.text_dim):
        raise ValueError(
            f"text of width {size.text_dim}, but ComfyUI reads a file's as {form.file.text_dim} wide"
        )
    shapes = form.shapes(form.base_model(form.config(size), dtype, torch.device("meta")))
    return _write_safetensors(
        Path(path), shapes, dtype, lambda name, shape: random_tensor(name, shape, seed, dtype)
    )


def write_lora(
    path: str | Path,
    model: str | Path,
    targets: tuple[str, ...],
    *,
    rank: int = 4,
    seed: int = 1,
    size: float = 0.5,
) -> Path:
    """Write a LoRA for LoraLoaderModelOnly on every layer of the file ``model`` that ends in one of
    ``targets``; at strength 1 a layer's weights change by ``size`` times their own scale.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(model, framework="pt") as tensors:
        for key in tensors.keys():
            name = key.removesuffix(".weight")
            if name != key and name.endswith(targets):
                fan_out, fan_in = tensors.get_slice(key).get_shape()
                shapes[f"diffusion_model.{name}.lora_down.weight"] = (rank, fan_in)
                shapes[f"diffusion_model.{name}.lora_up.weight"] = (fan_out, rank)
                shapes[f"diffusion_model.{name}.alpha"] = (1,)
    if not shapes:
        raise ValueError(f"no layer of {model} ends in any of {', '.join(targets)}")

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".alpha"):
            return torch.full(shape, float(rank))
        weight = random_tensor(name, shape, seed, torch.float32)
        return weight * size if name.endswith("lora_up.weight") else weight

    return _write_safetensors(Path(path), shapes, torch.float32, make)


def _write_safetensors(
    path: Path, shapes: Shapes, dtype: torch.dtype, make: Callable[[str, tuple[int, ...]], torch.Tensor]
) -> Path:
    """Write 8 bytes of header length, the JSON header padded to 8 bytes, and the tensors one after
    another (the format of safetensors 0.4).
    """
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(make(name, shape).contiguous().view(torch.uint8).numpy().data)
    return path
