"""Quantised weights: ComfyUI's QuantizedTensor stands for a weight and holds the tensors that it is
stored as. Here it is flattened into these tensors and plain data, and unflattened again.

Read: comfy/quant_ops.py, comfy/ops.py (mixed_precision_ops) @ ComfyUI 0.30.0. The class follows
torch's protocol for tensors that hold others (``__tensor_flatten__``), so nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .gguf import is_ggml, rebuilt_like

FIELDS = "non_tensor_fields"  # under which QuantizedTensor's own description has its plain data
DTYPE = "orig_dtype"  # the field that names the dtype to dequantise to; None: left open


def is_quantised(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "__tensor_flatten__")


def taken_apart(tensor: torch.Tensor) -> Any:
    """Returns a weight as a tree that can cross to another process: itself, or the tensors and
    fields of a quantised one. The fields name the dtype that the weight is dequantised to, which a
    loader may leave open until ComfyUI casts it.
    """
    if not is_quantised(tensor):
        return tensor.detach()
    names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "tensors": {name: getattr(tensor, name).detach() for name in names},
        "fields": {**context[FIELDS], DTYPE: context[FIELDS][DTYPE] or tensor.dtype},
    }


def put_together(tree: Any, like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``taken_apart``, and of ``described_weight`` for one of a GGUF file. ``like``:
    a weight that is quantised the same way, such as the one to be replaced.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if is_ggml(like):
        return rebuilt_like(tree, like)
    context = like.__tensor_flatten__()[1]  # pyright: ignore[reportAttributeAccessIssue]
    context = {**context, FIELDS: tree["fields"]}
    return type(like).__tensor_unflatten__(tree["tensors"], context, None, None)  # pyright: ignore[reportAttributeAccessIssue]


def stored_parts(tree: Any) -> dict[str, Any]:
    return tree["tensors"] if isinstance(tree, dict) else {"": tree}


def with_tensors(tree: Any, tensors: dict[str, Any]) -> Any:
    return {**tree, "tensors": tensors} if isinstance(tree, dict) else tensors[""]


def stored_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a weight is stored as."""
    return list(stored_parts(taken_apart(tensor)).values())


def stored_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Bytes in memory: a quantised weight's dtype is that it computes in, not is stored in."""
    return sum(tensor.nbytes for weight in weights for tensor in stored_tensors(weight))


def dtypes_of(model: Any) -> str:
    """Returns the dtype in which a BaseModel computes, and the smaller ones of its stored weights:
    ``bfloat16 of float8_e4m3fn``.
    """
    stored = {one.dtype for weight in model.diffusion_model.parameters() for one in stored_tensors(weight)}
    smaller = sorted(str(dtype).removeprefix("torch.") for dtype in stored if dtype.itemsize == 1)
    computed = str(model.get_dtype_inference()).removeprefix("torch.")
    return f"{computed} of {' and '.join(smaller)}" if smaller else computed


def named_tensors(name: str, weight: Any) -> dict[str, torch.Tensor]:
    """Returns the stored tensors of the quantised weight ``name``, by their names in a state
    dict.
    """
    return {key: tensor for key, tensor in weight.state_dict(name).items() if tensor is not None}
