"""Which layers of a small model are quantised, as those of released ones are."""

from __future__ import annotations

import torch

GROUP = 64  # columns that one rotation or one scale covers: divides every layer that is quantised here
NARROWEST = 128


def is_large(name: str, weight: torch.Tensor) -> bool:
    """Whether files quantise such a layer: not the narrow ones into and out of a model."""
    return (
        name.endswith(".weight")
        and weight.dim() == 2
        and min(weight.shape) >= NARROWEST
        and weight.shape[1] % GROUP == 0
    )
