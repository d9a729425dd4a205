"""Compares an evaluation that ranks share with what one of them makes of it alone."""

from __future__ import annotations

import torch

from ...parallel_runtime.client.alone import Alone, as_it_is
from .rounding import FACTOR, bound_of_one, off_by_a_rounding, relative_error

MOST = 2.0  # of the output's scale: what is further off is another output, however much is rounding


def errors_of(shared: list[torch.Tensor], alone: Alone) -> tuple[float, float]:
    """Returns how far ``shared`` is off, and how much is rounding, in units of the output's scale.
    Where that is more than is surely rounding, it is measured: one rank computes a latent that is
    off by a rounding. Numbers smaller than fp32 amplify that as they do any other order.
    """
    truth = alone(as_it_is)
    error, allowed = furthest(shared, truth), max(bound_of_one(one.dtype) for one in truth)
    if error > allowed:
        allowed = min(MOST, max(allowed, FACTOR * furthest(alone(off_by_a_rounding), truth)))
    return error, allowed


def furthest(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return max(relative_error(one.float(), whole.float()) for one, whole in zip(ours, truth, strict=True))
