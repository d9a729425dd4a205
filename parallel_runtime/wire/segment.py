"""Anonymous shared memory (memfd): nothing to unlink, gone with the last process that holds it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import SharedMemoryFull

ALIGN = 64
FAILED = ctypes.c_void_p(-1).value  # of mmap
PORTABLE = 1  # of cudaHostRegister: for all GPUs of the process
log = logging.getLogger("pipemesh")


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """The place of a contiguous tensor in a segment. ``version`` names content that stays
    unchanged; 0 means volatile.

    ``in_place``: a rank reads it where it lies and takes the rows it needs; nobody writes to it.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str
    version: int = 0
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        return dtype_named(self.dtype).itemsize * math.prod(self.shape)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype. Raises msgspec.DecodeError for a name that came over the wire and is no
    dtype's.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise msgspec.DecodeError(f"{name!r} is not a dtype")
    return dtype


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


class Segment:
    """A memfd mapped into this process. Views keep the mapping alive; ``close`` gives the
    descriptor back. ``room``: the bytes of addresses that are mapped at once, for a segment that
    grows: it and its views stay where they are then.
    """

    def __init__(self, fd: int, nbytes: int, room: int = 0):
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mapped(fd, nbytes, room)
        self._address = ctypes.addressof(self._mapping)
        self.is_pinned = False
        self._device: torch.device | None = None  # that it was to be pinned for
        self._is_told = False  # the log, that this cannot be
        self._registered: list[tuple[int, int]] = []  # [start, end) that GPUs reach, in order

    @property
    def registered_bytes(self) -> int:
        """Returns how many bytes of the segment this process holds pinned for GPUs."""
        return sum(end - start for start, end in self._registered)

    def pin(self, device: torch.device) -> None:
        """Has ``device`` copy from and to the memory itself while this process goes on, also when
        it was extended, until ``close``. Nothing happens for the CPU; where a GPU cannot, the log
        says so once.
        """
        if device.type == "cuda" and self._device is None:
            self._device = device
            self._register(0, self.nbytes)

    def _register(self, start: int, end: int) -> None:
        cudart: Any = torch.cuda.cudart()
        try:
            error = int(cudart.cudaHostRegister(self._address + start, end - start, PORTABLE))
        except AttributeError:
            error = -1
        self.is_pinned = not error
        if self.is_pinned:
            self._registered.append((start, end))
            return
        with contextlib.suppress(RuntimeError):  # else whatever runs next would tell of the error
            torch.empty(1, device=self._device).fill_(0)
            torch.cuda.synchronize(self._device)
        if self._is_told:
            return
        self._is_told = True
        log.warning(
            "[PipeMesh] %s cannot copy from shared memory itself (error %s of cudaHostRegister): its copies"
            " go through other memory, a little slower.",
            self._device,
            error,
        )

    def _unregister(self, end: int) -> None:
        """Unpins the memory behind ``end``. GPUs still reach the memory before it. If only the part
        behind could not be pinned before, all that is left counts as pinned again.
        """
        if gone := [one for one in self._registered if one[1] > end]:
            self._registered = [one for one in self._registered if one[1] <= end]
            with contextlib.suppress(RuntimeError):  # of a GPU that repeats an earlier error
                torch.cuda.synchronize(self._device)
            cudart: Any = torch.cuda.cudart()
            for start, _ in gone:
                cudart.cudaHostUnregister(self._address + start)
            if gone[0][0] < end:
                self._register(gone[0][0], end)
        self.is_pinned = 0 < end == self.registered_bytes

    @classmethod
    def create(cls, name: str, nbytes: int, room: int = 0) -> Segment:
        """Makes a segment, and reserves its pages. Raises SharedMemoryFull."""
        try:
            fd = os.memfd_create(f"pipemesh-{name}", os.MFD_CLOEXEC)
        except OSError as error:
            raise full(nbytes, error) from error
        try:
            reserve(fd, 0, nbytes)
            return cls(fd, nbytes, room)
        except BaseException:
            os.close(fd)
            raise

    def grow(self, nbytes: int) -> None:
        """Extends the segment to ``nbytes``. Raises SharedMemoryFull; then nothing has changed."""
        if nbytes > self.nbytes:
            require_addresses(nbytes, len(self._mapping))
            reserve(self.fd, self.nbytes, nbytes - self.nbytes)
            self.follow()

    def follow(self) -> None:
        """Maps the bytes by which another process has extended the segment, and pins only these."""
        if (there := os.fstat(self.fd).st_size) > self.nbytes:
            require_addresses(there, len(self._mapping))
            before, self.nbytes = self.nbytes, there
            if self.is_pinned:
                self._register(before, there)

    def cut(self, nbytes: int) -> None:
        """Unpins the memory behind ``nbytes``: its owner is about to shrink the segment."""
        if nbytes < self.nbytes:
            self._unregister(nbytes)
            self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back the memory behind ``nbytes``. Nobody may read or write there, and every other
        process has ``cut`` it off: a GPU would go on reaching pages that are no longer the file's.
        """
        if nbytes < self.nbytes:
            self.cut(nbytes)
            os.ftruncate(self.fd, nbytes)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """Returns a view of the segment, not a copy."""
        dtype, count = dtype_named(ref.dtype), math.prod(ref.shape)
        if ref.offset + ref.nbytes > self.nbytes:  # a page that is not there would end the process
            raise ValueError(f"A tensor ends at byte {ref.offset + ref.nbytes} of {self.nbytes}.")
        if not count:  # frombuffer takes no empty range
            return torch.empty(ref.shape, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=ref.offset).view(ref.shape)

    def put(self, offset: int, tensor: torch.Tensor, version: int = 0, later: bool = False) -> TensorRef:
        """Writes a tensor. ``later``: a GPU may do so on its own, where the memory is pinned."""
        ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype), version)
        self.tensor(ref).copy_(tensor, non_blocking=later and self.is_pinned)
        return ref

    def fill(self, pieces: Sequence[tuple[int, int]], fd: int) -> None:
        """Fills ``pieces`` (offset, bytes) of the segment from a file, one after another. Raises
        SharedMemoryFull if the file is shorter, because then its writer found no room. Raises
        ValueError for a piece behind the end.
        """
        at = 0
        for offset, nbytes in pieces:
            if offset + nbytes > self.nbytes:
                raise ValueError(f"A piece ends at byte {offset + nbytes} of {self.nbytes}.")
            place = memoryview(self._mapping).cast("B")[offset : offset + nbytes]
            while place:
                read = os.preadv(fd, [place], at)
                if not read:
                    raise SharedMemoryFull(
                        "Shared memory is full: data from another machine could not be kept; close other"
                        " programs, or choose a smaller image or batch."
                    )
                place, at = place[read:], at + read

    def unmap(self) -> None:
        """Drops the mapping. Nothing can be read or written here any more; existing views stay."""
        self.nbytes, self._mapping = 0, (ctypes.c_ubyte * 0)()

    def close(self) -> None:
        self._unregister(0)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def segment_over(fd: int) -> Segment:
    """Maps all of a file, whose descriptor stays the caller's. Raises SharedMemoryFull."""
    nbytes = os.fstat(fd).st_size
    try:
        return Segment(fd, nbytes)
    except OSError as error:
        raise full(nbytes, error) from error


def require_addresses(nbytes: int, there: int) -> None:
    """Raises SharedMemoryFull if there are fewer."""
    if nbytes > there:
        raise SharedMemoryFull(
            f"An evaluation takes {mib(nbytes)} of shared memory, and a process has addresses for"
            f" {mib(there)}: choose a smaller image or batch, or raise the limit of addresses (ulimit -v)."
        )


def spare_addresses() -> float:
    """Returns how many bytes of addresses a segment may map without having the memory: a quarter of
    the free part of the limit (ulimit -v), because checkpoints are mapped too. Infinite without a
    limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * mmap.PAGESIZE
    return max(0, limit - taken) // 4


def mapped(fd: int, nbytes: int, room: int = 0) -> ctypes.Array[ctypes.c_ubyte]:
    """Maps a file until nothing looks at it any more. ``room``: so many bytes, or as many as this
    process has addresses to spare; those behind ``nbytes`` can be used once the file reaches there.
    Raises OSError.
    """
    libc, length = ctypes.CDLL(None, use_errno=True), int(max(nbytes, min(room, spare_addresses())))
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    while (address := libc.mmap(None, length, access, mmap.MAP_SHARED, fd, 0)) == FAILED:
        if length == nbytes:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        length = max(nbytes, length // 2)
    mapping = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(mapping, libc.munmap, address, length).atexit = False
    return mapping


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Raises SharedMemoryFull."""
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        raise full(nbytes, error) from error


def full(nbytes: int, error: OSError) -> SharedMemoryFull:
    return SharedMemoryFull(
        f"Shared memory is full: {mib(nbytes)} more could not be reserved ({error.strerror}); close other"
        " programs, choose a smaller image or batch, or raise the memory limit of this container."
    )
