"""The host's memory: what there is, and giving back what was freed."""

from __future__ import annotations

import ctypes
from itertools import islice


def host_memory() -> tuple[int, int]:
    """(available, total) bytes. Not what is free: mapped checkpoints fill the page cache, which
    gives way.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        first = [line.split() for line in islice(lines, 3)]  # MemTotal, MemFree, MemAvailable
    return int(first[2][1]) << 10, int(first[0][1]) << 10


def give_back_freed() -> None:
    """glibc keeps freed blocks of many MiB in its heap; this returns them to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
