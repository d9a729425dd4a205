"""Tiny random-weight Flux models and LoRAs that ComfyUI's own loaders accept, for the demo, the
tests and the bench.

A file is written tensor by tensor, so its size is bounded by the disk, not by memory. Every tensor
has its own generator, seeded by (seed, name): a model is the same whatever is written before it,
and adding blocks leaves the others as they were. Layout of the keys: black-forest-labs' flux1
files, which ComfyUI detects (comfy/model_detection.py@0.30.0: heads = hidden / 128).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

FILE_AXES_DIM = (16, 56, 56)  # hard-coded by ComfyUI for every Flux file
LORA_TARGETS = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "linear1", "linear2")
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Shapes = Mapping[str, tuple[int, ...]]


def flux_config(
    *,
    heads: int = 2,
    axes_dim: Sequence[int] = FILE_AXES_DIM,
    double_blocks: int = 2,
    single_blocks: int = 2,
    context_dim: int = 64,
    vec_dim: int = 32,
    guidance: bool = False,
) -> dict[str, Any]:
    """The `unet_config` of a Flux with any number of heads and any head size (`sum(axes_dim)`);
    files only know head size 128.
    """
    return {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "hidden_size": heads * sum(axes_dim),
        "num_heads": heads,
        "axes_dim": list(axes_dim),
        "depth": double_blocks,
        "depth_single_blocks": single_blocks,
        "context_in_dim": context_dim,
        "vec_in_dim": vec_dim,
        "guidance_embed": guidance,
        "mlp_ratio": 4.0,
        "theta": 10000,
        "qkv_bias": True,
        "txt_ids_dims": [],
    }


def flux_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Flux that `config` describes, under its name in a file."""
    hidden, head_dim = config["hidden_size"], sum(config["axes_dim"])
    mlp = int(hidden * config["mlp_ratio"])
    pixels = config["in_channels"] * config["patch_size"] ** 2
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        shapes[f"{name}.weight"] = (fan_out, fan_in)
        shapes[f"{name}.bias"] = (fan_out,)

    def qk_norm(name: str) -> None:
        shapes[f"{name}.query_norm.scale"] = (head_dim,)
        shapes[f"{name}.key_norm.scale"] = (head_dim,)

    linear("img_in", pixels, hidden)
    linear("txt_in", config["context_in_dim"], hidden)
    embedders = {"time_in": 256, "vector_in": config["vec_in_dim"]} | ({"guidance_in": 256} if config["guidance_embed"] else {})
    for name, width in embedders.items():
        linear(f"{name}.in_layer", width, hidden)
        linear(f"{name}.out_layer", hidden, hidden)
    for block in range(config["depth"]):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            linear(f"{prefix}_mod.lin", hidden, 6 * hidden)
            linear(f"{prefix}_attn.qkv", hidden, 3 * hidden)
            qk_norm(f"{prefix}_attn.norm")
            linear(f"{prefix}_attn.proj", hidden, hidden)
            linear(f"{prefix}_mlp.0", hidden, mlp)
            linear(f"{prefix}_mlp.2", mlp, hidden)
    for block in range(config["depth_single_blocks"]):
        prefix = f"single_blocks.{block}"
        linear(f"{prefix}.modulation.lin", hidden, 3 * hidden)
        linear(f"{prefix}.linear1", hidden, 3 * hidden + mlp)
        qk_norm(f"{prefix}.norm")
        linear(f"{prefix}.linear2", hidden + mlp, hidden)
    linear("final_layer.adaLN_modulation.1", hidden, 2 * hidden)
    linear("final_layer.linear", hidden, pixels)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights N(0, 1 / fan_in), norm scales N(1, 0.1), biases N(0, 0.02): activations and
    modulation stay of order 1.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith(".scale"):
        return noise.mul_(0.1).add_(1.0).to(dtype)
    return noise.mul_(shape[1] ** -0.5 if len(shape) == 2 else 0.02).to(dtype)


def write_flux(
    path: str | Path,
    *,
    hidden: int = 256,
    double_blocks: int = 2,
    single_blocks: int = 2,
    context_dim: int = 64,
    vec_dim: int = 32,
    guidance: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """A Flux file for UNETLoader; `hidden` is a multiple of 128, the head size of every Flux
    file.
    """
    if hidden <= 0 or hidden % sum(FILE_AXES_DIM):
        raise ValueError(f"hidden must be a multiple of {sum(FILE_AXES_DIM)}, the head size of Flux files; got {hidden}")
    config = flux_config(
        heads=hidden // sum(FILE_AXES_DIM),
        double_blocks=double_blocks,
        single_blocks=single_blocks,
        context_dim=context_dim,
        vec_dim=vec_dim,
        guidance=guidance,
    )
    return _write_safetensors(Path(path), flux_shapes(config), dtype, lambda name, shape: random_tensor(name, shape, seed, dtype))


def write_lora(
    path: str | Path, flux_path: str | Path, *, rank: int = 4, seed: int = 1, size: float = 0.5, targets: Sequence[str] = LORA_TARGETS
) -> Path:
    """A LoRA for LoraLoaderModelOnly on every layer of `flux_path` that ends in one of `targets`;
    at strength 1 a layer's weights change by `size` times their own scale.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(flux_path, framework="pt") as flux:
        for key in flux.keys():
            name = key.removesuffix(".weight")
            if name != key and name.endswith(tuple(targets)):
                fan_out, fan_in = flux.get_slice(key).get_shape()
                shapes[f"diffusion_model.{name}.lora_down.weight"] = (rank, fan_in)
                shapes[f"diffusion_model.{name}.lora_up.weight"] = (fan_out, rank)
                shapes[f"diffusion_model.{name}.alpha"] = (1,)
    if not shapes:
        raise ValueError(f"no layer of {flux_path} ends in any of {', '.join(targets)}")

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".alpha"):
            return torch.full(shape, float(rank))
        weight = random_tensor(name, shape, seed, torch.float32)
        return weight * size if name.endswith("lora_up.weight") else weight

    return _write_safetensors(Path(path), shapes, torch.float32, make)


def build_flux_patcher(unet_config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelPatcher:
    """A stock MODEL without a file (`cached_patcher_init` is None); the same weights as
    `write_flux` of the same shapes and seed.
    """
    import comfy.model_management
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    family = comfy.supported_models.Flux if unet_config["guidance_embed"] else comfy.supported_models.FluxSchnell
    device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    config = family(dict(unet_config))
    config.set_inference_dtype(dtype, comfy.model_management.unet_manual_cast(dtype, device, config.supported_inference_dtypes))
    model = config.get_model({}, "").to(offload_device)
    shapes = flux_shapes(unet_config)
    model.load_model_weights({name: random_tensor(name, shape, seed, dtype) for name, shape in shapes.items()}, "")
    return ModelPatcher(model, load_device=device, offload_device=offload_device)


def _write_safetensors(path: Path, shapes: Shapes, dtype: torch.dtype, make: Callable[[str, tuple[int, ...]], torch.Tensor]) -> Path:
    """Format: 8 bytes of header length, the JSON header padded to 8 bytes, the tensors one after
    another (safetensors 0.4).
    """
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(memoryview(make(name, shape).contiguous().view(torch.uint8).numpy()))
    return path
