"""Read values that a device computes without waiting for what it has yet to compute."""

from __future__ import annotations

import torch


class LateValue:
    """The value of ``tensor``, of one element, to be read some operations later. On CUDA it is on
    its way to the CPU meanwhile.
    """

    def __init__(self, tensor: torch.Tensor):
        self._value = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def costs_a_wait(self) -> bool:
        """Whether reading it at once would wait for the device."""
        return self._event is not None

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
