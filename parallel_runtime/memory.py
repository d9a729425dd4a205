"""The machine's memory: how much there is, how freed blocks go back to it, what its pages tell."""

from __future__ import annotations

import ctypes
import os
from itertools import islice

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENTRY_BYTES = 8  # of /proc/self/pagemap, one a page
UNTOUCHED, FILE_PAGE = 0b000, 0b101  # its three highest bits: present, swapped out, page of a file


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


def is_equal_memory(one: int, other: int, nbytes: int) -> bool:
    """True if the bytes at two addresses are equal. As fast as memory is, without the GIL."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare(one, other, nbytes) == 0


def is_unwritten(address: int, nbytes: int) -> bool:
    """True if no page of a privately mapped file was written to since it was mapped.

    The first write to such a page gives the process a copy that is no page of a file, whoever
    writes and however. False where the system does not tell.
    """
    first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * ENTRY_BYTES)
            entries = pagemap.read((last - first + 1) * ENTRY_BYTES)
    except OSError:
        return False
    kinds = {highest >> 5 for highest in set(entries[ENTRY_BYTES - 1 :: ENTRY_BYTES])}
    return len(entries) == (last - first + 1) * ENTRY_BYTES and kinds <= {UNTOUCHED, FILE_PAGE}
