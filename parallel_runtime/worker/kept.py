"""Keep a run's conditioning on the rank's device, within a bound on its bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class KeptConditioning:
    """Tensors by version, the least recently used first. What the evaluation at hand names stays,
    of any size; beside it ``limit_bytes`` are kept.

    What goes is read again when it is next named: the arena has it for as long as the UI names it.
    """

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self.nbytes = 0  # of all that is kept
        self._tensors: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._named: set[int] = set()

    def get(self, version: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor of ``version``, the same object for as long as it is kept."""
        self._named.add(version)
        if version not in self._tensors:
            self._tensors[version] = read()
            self.nbytes += self._tensors[version].nbytes
        self._tensors.move_to_end(version)
        return self._tensors[version]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Names what is got inside; drops what is not, down to the limit, also where it fails."""
        self._named.clear()
        try:
            yield
        finally:
            others = [version for version in self._tensors if version not in self._named]
            held = sum(self._tensors[version].nbytes for version in others)
            for version in others:
                if held <= self._limit_bytes:
                    break
                dropped = self._tensors.pop(version).nbytes
                held -= dropped
                self.nbytes -= dropped

    def forget(self) -> None:
        self._tensors.clear()
        self.nbytes = 0
        self._named.clear()
