"""Pages of this process's own in the place of a mapped file's, at the addresses that those have.

A private mapping alone does not keep what was read: pages that were not written to follow the file,
and where it is cut short even those that were are taken away.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator

from .memory import PAGE_BYTES

CHUNK = 16 << 20
MAP_FIXED, MREMAP_MAYMOVE, MREMAP_FIXED = 0x10, 1, 2  # <sys/mman.h>
ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FAILED = ctypes.c_void_p(-1).value

Span = tuple[int, int]  # (address, bytes)


def pages_of(spans: Iterable[Span]) -> list[Span]:
    """Returns the whole pages on which ``spans`` lie, each once, in as few spans."""
    pages: list[Span] = []
    for address, nbytes in sorted(spans):
        start, end = address // PAGE_BYTES * PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if pages and start <= sum(pages[-1]):
            start = pages[-1][0]
            end = max(end, sum(pages.pop()))
        pages.append((start, end - start))
    return pages


def chunks_of(pages: Iterable[Span]) -> Iterator[Span]:
    for start, nbytes in pages:
        for offset in range(0, nbytes, CHUNK):
            yield start + offset, min(CHUNK, nbytes - offset)


def take_over(start: int, nbytes: int) -> None:
    """Puts a copy of these pages in their place, in one step for every thread that reads them.
    Raises OSError where there is no memory, or the file has no such pages any more.

    They are read through the kernel: reading them here would end the process then.
    """
    copy = _map(None, nbytes, ANYWHERE)
    try:
        content = memoryview((ctypes.c_char * nbytes).from_address(copy)).cast("B")
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            done = 0
            while done < nbytes:
                if not (read := os.preadv(memory, [content[done:]], start + done)):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += read
        finally:
            os.close(memory)
        _move(copy, nbytes, start)
    except OSError:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(copy), ctypes.c_size_t(nbytes))
        raise


def blank(start: int, nbytes: int) -> None:
    """Puts zeros in the place of these pages, so that reading them ends nobody."""
    _map(start, nbytes, ANYWHERE | MAP_FIXED)


def _map(address: int | None, nbytes: int, flags: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return _address(call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))


def _move(source: int, nbytes: int, to: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).mremap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _address(call(source, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, to))


def _address(result: int) -> int:
    if result == FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
