"""Quantised copies of model files, in every format that ComfyUI's own loaders take, made by
ComfyUI's own quantisation (comfy/quant_ops.py, comfy/utils.py @ 0.30.0).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..pool.trial.comparisons import GROUP, is_large

HALVES = ("convrot_w4a4", "nvfp4")  # two numbers in a byte


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a file's large layers are stored.

    ``algorithm``: a key of ComfyUI's QUANT_ALGOS, or empty where all weights are cast to ``dtype``
    without scales. ``options``: what its quantisation takes; ``said``: those that the file says.
    ``old``: scales are named as files before ComfyUI 0.4 name them.
    """

    algorithm: str = ""
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    old: bool = False


CONVROT = {"convrot": True, "convrot_groupsize": GROUP}
FORMATS: Mapping[str, Format] = {
    "fp8": Format(dtype=torch.float8_e4m3fn),
    "fp8_e5m2": Format(dtype=torch.float8_e5m2),
    "fp8_scaled": Format(algorithm="float8_e4m3fn", options={"scale": "recalculate"}),
    "fp8_scaled_old": Format(algorithm="float8_e4m3fn", options={"scale": "recalculate"}, old=True),
    "fp8_e5m2_scaled": Format(algorithm="float8_e5m2", options={"scale": "recalculate"}),
    "int8": Format(algorithm="int8_tensorwise"),
    "int8_rowwise": Format(algorithm="int8_tensorwise", options={"per_channel": True}),
    "int8_convrot": Format(
        algorithm="int8_tensorwise", options={"per_channel": True, **CONVROT}, said=tuple(CONVROT)
    ),
    "convrot_w4a4": Format(
        algorithm="convrot_w4a4", options={"convrot_groupsize": GROUP}, said=("convrot_groupsize",)
    ),
    "mxfp8": Format(algorithm="mxfp8"),
    "nvfp4": Format(algorithm="nvfp4"),
}


def write_quantised(
    path: str | Path, model: str | Path, form: str, taken: Collection[str] | None = None
) -> Path:
    """Write the file ``model`` in one of ``FORMATS``."""
    save_file(quantised_state(load_file(model), FORMATS[form], taken), path)
    return Path(path)


def taken_by(model: torch.nn.Module, form: str) -> set[str]:
    """The weights of a transformer that ComfyUI takes in a format: of linear layers, and of
    embeddings where two numbers do not share a byte.
    """
    kinds = (torch.nn.Linear,) if FORMATS[form].algorithm in HALVES else (torch.nn.Linear, torch.nn.Embedding)
    return {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, kinds)}


def quantised_state(
    weights: Mapping[str, torch.Tensor], given: Format, taken: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a file that stores ``weights`` in a format. ``taken``: the names of those that
    may be quantised; None: all.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not given.algorithm:
            stored[name] = weight.to(given.dtype)
        elif is_large(name, weight) and (taken is None or name in taken):
            stored |= quantised(name, weight, given)
        else:
            stored[name] = weight
    if given.old:
        stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return stored


def quantised(name: str, weight: torch.Tensor, given: Format) -> dict[str, torch.Tensor]:
    """Quantise one layer's weight into the tensors that a file has for it."""
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    made = QuantizedTensor.from_float(
        weight, QUANT_ALGOS[given.algorithm]["comfy_tensor_layout"], **given.options
    )
    layer = name.removesuffix(".weight")
    stored = {key: tensor.clone() for key, tensor in made.state_dict(name).items()}
    if given.old:
        return {name: stored[name], f"{layer}.scale_weight": stored[f"{name}_scale"]}
    said = {"format": given.algorithm} | {key: given.options[key] for key in given.said}
    return stored | {f"{layer}.comfy_quant": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}
