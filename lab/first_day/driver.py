"""Copies and numbers that a GPU's queues carry out, by calls of CUDA's driver."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .staged import IN, OUT, WRAP

PORTABLE, MAPPED = 1, 2  # of cuMemHostRegister: for all contexts, and at an address of the GPU's
USED = PORTABLE | MAPPED
GEQ = 0  # of cuStreamWaitValue32: goes on at a number that has been reached, or passed


class Refused(Exception):
    """A call of the driver's returned an error."""


def driver() -> Any:
    return import_module("cuda.bindings.driver")  # comes with torch, and needs libcuda when it is used


def checked(answer: Any) -> Any:
    """Return what a call of the driver's returned beside its code. Raises Refused."""
    code, *values = answer
    if int(code):
        raise Refused(str(getattr(code, "name", code)))
    return values[0] if values else None


class GpuEngine:
    """Two streams of this process's current GPU. ``address``: of ``nbytes`` of shared memory as
    this process has mapped them, which are registered until ``close``. Raises Refused.
    """

    def __init__(self, address: int, nbytes: int, flags: int = USED):
        self._driver, self._address = driver(), address
        self.streams = {queue: torch.cuda.Stream() for queue in (OUT, IN)}
        self._raw = {queue: self._driver.CUstream(one.cuda_stream) for queue, one in self.streams.items()}
        self._begun, *self._ended = (torch.cuda.Event() for _ in range(3))
        checked(self._driver.cuMemHostRegister(address, nbytes, flags))
        try:
            self.base = int(checked(self._driver.cuMemHostGetDevicePointer(address, 0)))
        except Refused:
            checked(self._driver.cuMemHostUnregister(address))
            raise

    def begin(self) -> None:
        self._begun.record()
        for stream in self.streams.values():
            stream.wait_event(self._begun)

    def copy(self, queue: int, to: int, source: int, nbytes: int) -> None:
        checked(self._driver.cuMemcpyAsync(to, source, nbytes, self._raw[queue]))

    def write(self, queue: int, offset: int, number: int) -> None:
        """A fence of the whole system comes before it, with these flags."""
        checked(self._driver.cuStreamWriteValue32(self._raw[queue], self.base + offset, number % WRAP, 0))

    def wait(self, queue: int, offset: int, number: int) -> None:
        checked(self._driver.cuStreamWaitValue32(self._raw[queue], self.base + offset, number % WRAP, GEQ))

    def end(self) -> None:
        current = torch.cuda.current_stream()
        for stream, ended in zip(self.streams.values(), self._ended, strict=True):
            ended.record(stream)
            current.wait_event(ended)

    def close(self) -> None:
        torch.cuda.synchronize()
        checked(self._driver.cuMemHostUnregister(self._address))
