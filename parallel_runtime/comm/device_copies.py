"""Bring values to a device and back without waiting for the computations that the device has still
to do.

Only copies from and to pinned memory return at once: a copy of ordinary memory may first wait for
all enqueued work. torch keeps pinned memory for the next copy of that size.
"""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on ``device``, or the tensor itself if it is there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staged.copy_(tensor)
    return staged.to(device, non_blocking=True)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the CPU, and return the place, whose content is there when the
    device has come so far. A tensor on the CPU is returned itself.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Reached:
    """The place that the device's queue has come to by now, to be waited for later."""

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._error: RuntimeError | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def is_over(self) -> bool:
        """Whether the device has come so far. If it tells of an error, ``wait`` raises it."""
        try:
            return self._event is None or self._error is not None or self._event.query()
        except RuntimeError as error:
            self._error = error
            return True

    def wait(self) -> None:
        """Raises RuntimeError if the device failed."""
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.synchronize()


class LateValue(Reached):
    """The value of ``tensor``, of one element, to be read some operations later."""

    def __init__(self, tensor: torch.Tensor):
        self._value = to_cpu(tensor)
        super().__init__(tensor.device)

    def read(self) -> float:
        self.wait()
        return float(self._value)
