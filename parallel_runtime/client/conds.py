"""Take the conds of one evaluation to the transformer side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .timelines import Asked, in_flight_together


def side_by_side(
    executor: Any, asks: tuple, evaluate: Callable[[Sequence[Asked]], list[Any]]
) -> list[torch.Tensor]:
    """Does what ComfyUI's batch of conds does, each side by itself, and calls ``evaluate`` for the
    next evaluations of all sides. ``asks``: the arguments of a CALC_COND_BATCH wrapper.
    """
    model, conds, x, timestep, model_options = asks
    present = [index for index, cond in enumerate(conds) if cond is not None]

    def alone(index: int) -> torch.Tensor:
        only = [cond if number == index else None for number, cond in enumerate(conds)]
        return executor(model, only, x, timestep, model_options)[index]

    outputs = in_flight_together([partial(alone, index) for index in present], evaluate)
    by_index = dict(zip(present, outputs, strict=True))
    return [by_index[index] if index in by_index else torch.zeros_like(x) for index in range(len(conds))]
