"""Put the object patches of a MODEL into place in a rank, and take them away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..crossing.block_code import IN_BLOCK, PatchesHere, put_patches
from ..weights.weight_patches import put_object


class ObjectPatches:
    """The object patches of one model. ``in_block``: nodes' code in the blocks, which may note what
    it needs of a run; ``weights``: those that stand in for weights, which whoever keeps the model's
    weights puts into place.
    """

    def __init__(self, model: Any, device: torch.device):
        self.in_block = PatchesHere()
        self.weights: dict[str, torch.Tensor] = {}
        self._model = model
        self._device = device
        self._take_away: list[Callable[[], Any]] = []  # in the order in which they were put

    def put(self, objects: dict[str, Any], is_weight: Callable[[str], bool]) -> None:
        """Replace the present object patches by ``objects``."""
        while self._take_away:
            self._take_away.pop()()
        self.in_block, others = PatchesHere(), dict(objects)
        self.weights = {name: others.pop(name) for name in objects if is_weight(name)}
        if IN_BLOCK in others:
            self.in_block = put_patches(self._model, others.pop(IN_BLOCK), self._device)
            others |= self.in_block.methods
        for name, value in others.items():
            take_away = put_object(self._model, name, value, self._device)
            if take_away is not None:
                self._take_away.append(take_away)
