"""Weights of GGUF files, as the node pack ComfyUI-GGUF loads them: bytes with a type and a shape in
a tensor class of the pack's, dequantised by the pack's own operations in every forward. A rank
imports the operations from the pack's folder.

Read: ops.py (GGMLTensor, GGMLLayer, GGMLOps) and nodes.py (GGUFModelPatcher) of ComfyUI-GGUF at
795e451. A LoRA is not computed into such a weight: it hangs on it and is applied in every forward.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch

from ..errors import Refused
from ..refusals import ON_ONE_GPU

OPERATIONS, TENSOR = "GGMLOps", "GGMLTensor"
SETTINGS = ("dequant_dtype", "patch_dtype")  # of the class of linear layers, from inputs of the pack's node
FILES = ("ops.py", "dequant.py")  # what a rank runs of the pack
PACKAGE = "pipemesh_gguf"  # the pack's name in a rank; its own top level, with its nodes, is not run there


def is_ggml(tensor: Any) -> bool:
    return type(tensor).__name__ == TENSOR and hasattr(tensor, "tensor_type")


def is_dequantised_late(tensor: Any) -> bool:
    """True for a weight whose bytes are no numbers: a LoRA is applied to it in every forward
    then.
    """
    return is_ggml(tensor) and not tensor.dtype.is_floating_point


def described_operations(custom_operations: Any) -> dict[str, Any] | None:
    """In the UI: returns where a rank finds a MODEL's operations, and their settings; None for
    ComfyUI's own. Raises Refused unless they are ComfyUI-GGUF's.
    """
    if custom_operations is None:
        return None
    kind = custom_operations if isinstance(custom_operations, type) else type(custom_operations)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if kind.__name__ != OPERATIONS or file is None or Path(file).name != FILES[0]:
        raise Refused(
            f"This MODEL computes with operations of its own ({kind.__module__}.{kind.__qualname__}), which"
            f" the ranks do not have: load it with a stock loader, or {ON_ONE_GPU}."
        )
    folder = Path(file).parent
    settings = {name: getattr(kind.Linear, name, None) for name in SETTINGS}  # pyright: ignore[reportAttributeAccessIssue]
    return {"folder": str(folder), "hash": content_hash(folder), "settings": settings}


def content_hash(folder: Path) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name in FILES:
        content.update((folder / name).read_bytes() if (folder / name).exists() else b"")
    return content.hexdigest()


def import_operations(described: dict[str, Any]) -> types.ModuleType:
    """In a rank: imports the pack's module of operations, with the MODEL's settings. Raises Refused
    if this machine has another version of the pack, or none.
    """
    folder = Path(described["folder"])
    if not (folder / FILES[0]).exists():
        raise Refused(
            f"This machine has no node pack at {folder}, which the MODEL needs to read GGUF weights: install"
            " it there too."
        )
    if content_hash(folder) != described["hash"]:
        raise Refused(
            f"The node pack at {folder} is another version than ComfyUI runs: restart ComfyUI, or update the"
            " pack on this machine."
        )
    name = f"{PACKAGE}_{described['hash']}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    try:
        operations = importlib.import_module(f"{name}.{Path(FILES[0]).stem}")
    except ImportError as error:
        raise Refused(
            f"The node pack at {folder} cannot be imported in a rank ({error}): install what it requires."
        ) from error
    for setting, value in described["settings"].items():
        setattr(operations.GGMLOps.Linear, setting, value)
    return operations


def described_weight(weight: Any) -> dict[str, Any]:
    return {
        "content": weight.as_subclass(torch.Tensor),
        "type": int(weight.tensor_type),
        "shape": tuple(weight.tensor_shape),
    }


def rebuilt_weight(described: dict[str, Any], operations: types.ModuleType) -> torch.Tensor:
    """In a rank: the inverse of ``described_weight``."""
    kind = operations.gguf.GGMLQuantizationType(described["type"])
    return operations.GGMLTensor(
        described["content"], tensor_type=kind, tensor_shape=torch.Size(described["shape"])
    )


def rebuilt_like(described: dict[str, Any], weight: Any) -> torch.Tensor:
    """In a rank: the same, by the operations that ``weight`` has."""
    return rebuilt_weight(described, sys.modules[type(weight).__module__])


def with_patches(weight: Any, patches: list, key: str, device: torch.device) -> torch.Tensor:
    """In a rank: the weight with these weight patches on it, for the pack's operations to apply."""
    move = sys.modules[type(weight).__module__].move_patch_to_device  # pyright: ignore[reportAttributeAccessIssue]
    patched = type(weight)(
        weight.as_subclass(torch.Tensor), tensor_type=weight.tensor_type, tensor_shape=weight.tensor_shape
    )
    patched.patches = [(move(patches, device), key)]
    return patched
