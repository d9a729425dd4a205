"""Memoise rotary embeddings: a forward makes them anew for every patch, from the same positions."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

KEPT = 4  # positions that a forward asks for in turn: of its branches, of the pictures it refers to


class RopeCache:
    """Memoises the forward of one module, of one tensor, from ``attach`` to ``detach``. Positions
    are compared by value: hosts build them anew for every forward. On other devices than the CPU
    the comparison would wait for all that they have to compute, and the result is made anew.

    The result must not be written to.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._make = module.forward
        self._kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=KEPT)

    def attach(self) -> None:
        self._module.forward = self

    def detach(self) -> None:
        del self._module.forward
        self._kept.clear()

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        if positions.device.type != "cpu":
            return self._make(positions)
        for before, made in self._kept:
            if (
                before.dtype == positions.dtype
                and before.device == positions.device
                and torch.equal(before, positions)
            ):
                return made
        made = self._make(positions)
        self._kept.append((positions.clone(), made))
        return made

    def end_run(self) -> None:
        self._kept.clear()
