"""What a model's forward makes anew for every patch, though it is the same for all of them: rotary
embeddings of the positions.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

KEPT = 4  # positions that a forward asks for in turn: of its branches, of the pictures it refers to


class Remembered:
    """Stands in for a module's ``forward`` of one tensor until ``remove``: what was made of an
    equal one is handed out again.

    The result must not be written to. Equality is of values: hosts build the positions anew for
    every forward.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._make = module.forward
        self._kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=KEPT)
        module.forward = self

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        for before, made in self._kept:
            if before.dtype == positions.dtype and before.device == positions.device and torch.equal(before, positions):
                return made
        made = self._make(positions)
        self._kept.append((positions.clone(), made))
        return made

    def forget(self) -> None:
        self._kept.clear()

    def remove(self) -> None:
        del self._module.forward
