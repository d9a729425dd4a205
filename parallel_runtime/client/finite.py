"""Look for numbers that are not finite in the first output of a run, before a sampler makes a black
picture of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..crossing.rows import latents_of, tensors_in
from ..errors import ModelError


def require_finite(output: Any, arguments: Mapping[str, Any], made_by: str) -> None:
    """Raises ModelError where the output has NaN or infinite numbers, and what it was computed of
    has none: as the host then computes such numbers too. ``made_by``: the layout, and how it keeps
    weights. An output on the CPU is looked at without waiting for a device.
    """
    outputs = tensors_in(output)
    lost, numbers = sum(not_finite(one) for one in outputs), sum(one.numel() for one in outputs)
    if (
        not lost
        or any(not_finite(one) for one in latents_of(dict(arguments)))
        or any(bool(one.isnan().any()) for one in tensors_in(arguments))
    ):
        return
    raise ModelError(
        f"The first output of this MODEL from {made_by} has {lost} of {numbers} numbers that are NaN or"
        " infinite, and would make a black picture: sample it on one GPU, without PipeMesh Parallelize;"
        " where it is black there too, the cause is the MODEL, its dtype or a LoRA, else set weights of"
        " PipeMesh Pool to whole, and report it."
    )


def not_finite(tensor: torch.Tensor) -> int:
    return 0 if bool(tensor.isfinite().all()) else int(tensor.numel() - tensor.isfinite().sum())
