"""Compute one evaluation in fp32, whatever dtype a model's weights have: two orders of adding up
differ by 1e-7 there, so that a wrong token plan shows. In bf16 rounding may hide it.

No copy of the weights is made. The host casts a layer's weights to the dtype of its input if a
function is to be applied to them, as it does for a LoRA; it dequantises quantised weights.

Read: comfy/ops.py (CastWeightBiasOp and its layers, mixed_precision_ops) @ ComfyUI 0.30.0, 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

FUNCTIONS = "weight_function"  # an attribute of layers: what is applied to their weights
OPTIONS = "transformer_options"


def arguments_in_fp32(arguments: dict[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return an evaluation's arguments in fp32. The options in ``left_out`` are dropped, because
    they name functions that compute in a dtype of their own.
    """
    made = {name: tree_map_only(torch.Tensor, widened, value) for name, value in arguments.items()}
    if OPTIONS in arguments:
        options = arguments[OPTIONS].items()
        made[OPTIONS] = {name: value for name, value in options if name not in left_out}
    return made


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def uncast(weight: torch.Tensor) -> torch.Tensor:
    return weight


@contextmanager
def computing_in_fp32(model: torch.nn.Module, forget: str = "") -> Iterator[None]:
    """Inside, a model computes in the dtype of its input: fp32, and no TF32. Parameters and buffers
    beside the host's layers, such as tables, are copies. ``forget``: the model's method that frees
    what it kept of earlier evaluations; afterwards it has that again.
    """
    with ExitStack() as back:
        if forget:
            back.callback(vars(model).update, vars(model).copy())
            getattr(model, forget)()
        _put(back, torch.backends.cudnn, "allow_tf32", False)
        _put(back, torch.backends.cuda.matmul, "allow_tf32", False)
        for module in model.modules():
            if isinstance(vars(module).get("dtype"), torch.dtype):
                _put(back, module, "dtype", torch.float32)
            functions: Any = getattr(module, FUNCTIONS, None)
            if functions is not None:
                if FUNCTIONS not in vars(module):
                    back.callback(delattr, module, FUNCTIONS)
                _put(back, module, FUNCTIONS, [*functions, uncast])
                continue
            several: list[dict[str, Any]] = [module._parameters, module._buffers]
            for slots in several:
                own = {name: one for name, one in slots.items() if one is not None}
                back.callback(slots.update, own)
                slots.update({name: widened(one.detach()) for name, one in own.items()})
        yield


def _put(back: ExitStack, holder: Any, name: str, value: Any) -> None:
    back.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, value)
