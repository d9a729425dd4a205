"""Stand for a layer's weight of which a rank has a part alone.

Read: torch/_tensor.py @ torch 2.11; comfy/ops.py (linear_input_act, cast_bias_weight) @ ComfyUI
0.30.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import Refused
from ..refusals import ON_ONE_GPU


class Placeholder(torch.Tensor):
    """A weight without content, for code that only asks for a shape, a dtype or a device. Any
    computation with it raises Refused, which names it.

    It is a plain tensor, even if the weight is quantised: helpers of the host that compute with a
    quantised weight outside of its layer's forward then leave it to the forward, which has the
    weights of several layers one after another, while such a helper would want all at once.
    """

    of: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, weight: torch.Tensor, device: torch.device, of: str) -> Placeholder:
        """``of``: the weight's name in the model."""
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=device
        )
        made.of = of
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        if func is torch.ops.aten.detach.default:  # by which modules list what they have
            return cls(read, read.device, read.of)
        raise Refused(
            f"{read.of} was read outside of its layer's forward, and each rank holds only a part of it: set"
            f" weights of PipeMesh Pool to whole, or {ON_ONE_GPU}."
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({self.of}, {tuple(self.shape)}, {self.dtype}, for {self.device})"
