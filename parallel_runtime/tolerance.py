"""Measures how far a result is from a sure result, and has the table of distances that count as
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .comm.bands import ROWS


@dataclass(frozen=True)
class Tolerance:
    """The distance of two results is the largest distance of their numbers; with ``axis``, the
    largest root mean square over the numbers of one place on that axis. Its unit is the sure
    result's scale (standard deviation), or ``least_scale`` if that is more. Rounding is a distance
    up to ``of_scale``, or up to ``eps`` times the machine epsilon of the sure result's dtype if
    that is more.
    """

    of_scale: float
    eps: int
    axis: int | None = None
    least_scale: float = 1e-12

    def each(self, ours: torch.Tensor, sure: torch.Tensor) -> torch.Tensor:
        """Returns the distances by place; infinite if the shapes differ or a number is not
        finite.
        """
        if ours.shape != sure.shape or not torch.isfinite(ours).all():
            return torch.tensor([float("inf")])
        ours, sure = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in (ours, sure))
        off = (ours - sure).abs()
        if self.axis is not None:
            off = off.square().movedim(self.axis, 0).flatten(1).mean(1).sqrt()
        return off / sure.std().clamp(min=self.least_scale)

    def distance(self, ours: Sequence[torch.Tensor], sure: Sequence[torch.Tensor]) -> float:
        """Returns the largest distance of several tensors."""
        return max(float(self.each(*pair).max()) for pair in zip(ours, sure, strict=True))

    def off(self, ours: Sequence[torch.Tensor], sure: Sequence[torch.Tensor]) -> float:
        """Returns the distance if it is more than rounding, else 0."""
        distance = self.distance(ours, sure)
        return 0.0 if distance <= self.allowed(sure) else distance

    def allowed(self, sure: Sequence[torch.Tensor]) -> float:
        return max(self.of_scale, *(self.eps * torch.finfo(one.dtype).eps for one in sure))


# fp32: 3e-7 of reordering grows to at most 8.7e-6 over a run. CPUs differ from each other, and
# orders from other orders, five times as much as one rounding
EVALUATION = Tolerance(2e-5, 20)
ROWS_OF_BATCH = Tolerance(1e-3, 4, axis=0)  # batches of other sizes take other kernels
ROWS_OF_PICTURE = Tolerance(1e-3, 8, axis=ROWS, least_scale=1.0)  # a picture's part may be grey
