"""The machine's memory: how much there is, and how freed blocks go back to it."""

from __future__ import annotations

import ctypes
from itertools import islice


def system_memory() -> tuple[int, int]:
    """(available, total) bytes. Available is more than free: the page cache, full of mapped
    checkpoints, gives way.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        first = [line.split() for line in islice(lines, 3)]  # MemTotal, MemFree, MemAvailable
    return int(first[2][1]) << 10, int(first[0][1]) << 10


def give_back_freed() -> None:
    """Returns freed blocks to the system: glibc keeps many MiB of them in its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
