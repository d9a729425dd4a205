"""Measure the memory of a rank's device, reserve memory for a run, and give unused memory back."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable

import torch

from ..errors import NoRoom
from ..memory import give_back_freed, system_memory
from ..wire.messages import Memory
from ..wire.segment import mib

LITTLE = 16  # of what is free, a part that nobody misses
FULL = 4  # a GPU with less free than this part of it, outside of torch's cache, is nearly full
OF_A_DEVICE = re.compile(r"\b(CUDA|HIP|NCCL|RCCL)\b|cu(BLAS|DNN)", re.IGNORECASE)
MEMORY_KEPT_S = 1.0  # asking the system costs as much as the rest of a short evaluation's answer


class DeviceMemory:
    """The memory of one rank's device. ``model_bytes`` counts the resident models' weights,
    ``conditioning_bytes`` a run's conditioning, ``kept_bytes`` messages' memory and tensors that
    methods keep, ``set_bytes`` sets of patched weights, on the device or in main memory,
    ``graph_bytes`` the memory that torch keeps for CUDA graphs. The handler sets all five.
    """

    def __init__(self, device: torch.device, rank: int, sharers: int = 1):
        """``sharers``: the ranks on the device that ask for room at the same time, this one too."""
        self.model_bytes = 0
        self.conditioning_bytes = 0
        self.set_bytes: Callable[[bool], int] = lambda on_device: 0
        self.kept_bytes: Callable[[], int] = lambda: 0
        self.graph_bytes: Callable[[], int] = lambda: 0
        self._sharers = sharers
        self._device = device
        self._rank = rank
        self._last = Memory(0, 0, 0)
        self._asked_at = -MEMORY_KEPT_S

    def now(self) -> Memory:
        """Measures the device's memory. A GPU that repeats an earlier error answers nothing: then
        the last figures stand, for the error has a sentence of its own.
        """
        with contextlib.suppress(RuntimeError):
            self._last, self._asked_at = self._measure(), time.monotonic()
        return self._last

    def is_dead(self, error: Exception) -> bool:
        """Returns whether the device, or its transport, no longer answers, as after an error of a
        kernel: all later calls fail too.
        """
        names = not is_out_of_memory(error) and OF_A_DEVICE.search(str(error))
        if isinstance(error, RuntimeError) and names:
            return True
        try:
            if self._device.type == "cuda":
                torch.cuda.mem_get_info(self._device)
        except RuntimeError:
            return True
        return False

    def recent(self) -> Memory:
        """Returns the last measurement if it is at most ``MEMORY_KEPT_S`` old, else a new one. The
        bytes of models and conditioning are always the present ones.
        """
        last = self._last if time.monotonic() - self._asked_at <= MEMORY_KEPT_S else self.now()
        held = self.model_bytes, self.conditioning_bytes, last.kept, last.sets, last.sets_in_main, last.graphs
        return Memory(last.free, last.total, *held)

    def _measure(self) -> Memory:
        sets = self.set_bytes(True), self.set_bytes(False)
        held = self.model_bytes, self.conditioning_bytes, self.kept_bytes(), *sets, self.graph_bytes()
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return Memory(free + max(0, cached - self.graph_bytes()), total, *held)
        return Memory(*system_memory(), *held)

    def free_on(self, device: torch.device, ranks: int) -> int:
        """Returns this rank's share of the free bytes on its own device, or of the free main
        memory, which at most all ``ranks`` share.
        """
        return self.now().free // self._sharers if device == self._device else system_memory()[0] // ranks

    def reserve(self, nbytes: int) -> None:
        """Checks that this rank's share of the free memory has ``nbytes``. Raises NoRoom."""
        free = self.now().free // self._sharers
        if nbytes > free:
            raise NoRoom(
                f"Rank {self._rank} needs {mib(nbytes)} for the keys and values of its blocks and {mib(free)}"
                " are free: add ranks, make the image or the batch smaller, or free memory."
            )

    def little(self) -> int:
        """Returns how many bytes nobody misses: they may stay from run to run."""
        return self.now().free // self._sharers // LITTLE

    @property
    def is_tight(self) -> bool:
        """Returns whether others on the GPU lack what torch caches there: several ranks share it,
        or it is nearly full.
        """
        if self._device.type != "cuda":
            return False
        if self._sharers > 1:
            return True
        with contextlib.suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info(self._device)
            return free * FULL < total
        return True

    def give_back(self) -> None:
        """Returns memory that is free in this process to the system: on its GPU the UI decodes
        images, and text encoders wait.
        """
        give_back_freed()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Returns the memory that torch caches to the GPU. Nothing happens on a GPU that repeats an
        earlier error.
        """
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in text or "not enough memory" in text or "out of memory" in text)
    )
