"""The machine's memory: how much there is, how freed blocks go back to it, what its pages tell."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import struct
from itertools import islice
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENTRY_BYTES = 8  # of /proc/self/pagemap, one a page
UNTOUCHED, FILE_PAGE = 0b000, 0b101  # its three highest bits: present, swapped out, page of a file
# Of <linux/fs.h>: the call, PAGE_IS_FILE, and PAGE_IS_PRESENT or PAGE_IS_SWAPPED
PAGEMAP_SCAN, NO_FILE, IN_USE = 0xC0606610, 1 << 2, 1 << 3 | 1 << 4


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


def mapped_privately(inode: int) -> list[range]:
    """Returns the addresses at which this process has mapped a file for itself. Of shared mappings,
    which others may write to, ``is_unwritten`` tells nothing.
    """
    found = []
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):  # a path may have any bytes
        parts = line.split(maxsplit=5)
        if len(parts) > 4 and parts[1].endswith(b"p") and int(parts[4]) == inode:
            found.append(range(*(int(end, 16) for end in parts[0].split(b"-"))))
    return found


def is_unwritten(address: int, nbytes: int) -> bool:
    """True if no page of a privately mapped file was written to since it was mapped.

    The first write to such a page gives the process a copy that is no page of a file, whoever
    writes and however. False where the system does not tell.
    """
    first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            try:
                return not has_own_page(pagemap.fileno(), first * PAGE_BYTES, (last + 1) * PAGE_BYTES)
            except OSError:  # a kernel before 6.7
                return are_pages_of_files(pagemap, first, last + 1)
    except OSError:
        return False


def has_own_page(pagemap: int, start: int, end: int) -> bool:
    """Asks the kernel for the first page in this range of addresses that is this process's own. It
    looks through 24 GiB in milliseconds, and copies nothing. Raises OSError where it has no such
    call (linux/fs.h: PAGEMAP_SCAN, struct pm_scan_arg, since Linux 6.7).
    """
    region = (ctypes.c_uint64 * 3)()
    looked_for = NO_FILE, NO_FILE, IN_USE, IN_USE  # inverted, all of, any of, told
    scan = struct.pack("12Q", 96, 0, start, end, 0, ctypes.addressof(region), 1, 1, *looked_for)
    return fcntl.ioctl(pagemap, PAGEMAP_SCAN, bytearray(scan)) > 0


def are_pages_of_files(pagemap: io.RawIOBase, first: int, end: int) -> bool:
    """Reads the same from eight bytes for each page: 48 MiB for 24 GiB."""
    pagemap.seek(first * ENTRY_BYTES)
    entries = pagemap.read((end - first) * ENTRY_BYTES) or b""
    kinds = {highest >> 5 for highest in set(entries[ENTRY_BYTES - 1 :: ENTRY_BYTES])}
    return len(entries) == (end - first) * ENTRY_BYTES and kinds <= {UNTOUCHED, FILE_PAGE}
