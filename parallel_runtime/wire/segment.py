"""Anonymous shared memory (memfd): nothing to unlink, gone with the last process that holds it."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..errors import SharedMemoryFull

ALIGN = 64
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
    descriptor back.
    """

    def __init__(self, fd: int, nbytes: int):
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, nbytes)
        self.is_pinned = False
        self._device: torch.device | None = None  # that it was to be pinned for
        # Mappings that are: an older one may still have views
        self._pinned: list[torch.Tensor] = []

    def pin(self, device: torch.device) -> None:
        """Has ``device`` copy from and to the memory itself while this process goes on, also when
        it was extended, until ``close``. Nothing happens for the CPU; where a GPU cannot, the log
        says so once.
        """
        if device.type == "cuda" and self._device is None:
            self._device = device
            self._register(device)

    def _register(self, device: torch.device) -> None:
        mapping = torch.frombuffer(self._mapping, dtype=torch.uint8)
        cudart: Any = torch.cuda.cudart()
        try:
            error = int(cudart.cudaHostRegister(mapping.data_ptr(), mapping.nbytes, PORTABLE))
        except AttributeError:
            error = -1
        self.is_pinned = not error
        if self.is_pinned:
            self._pinned.append(mapping)
            return
        with contextlib.suppress(RuntimeError):  # else whatever runs next would tell of the error
            torch.empty(1, device=device).fill_(0)
            torch.cuda.synchronize(device)
        log.warning(
            "[PipeMesh] %s cannot copy from shared memory itself (error %s of cudaHostRegister): its copies"
            " go through other memory, a little slower.",
            device,
            error,
        )

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Makes a segment. Raises SharedMemoryFull when the system has no room: pages are reserved
        here, not at first touch.
        """
        fd = os.memfd_create(f"pipemesh-{name}", os.MFD_CLOEXEC)
        try:
            reserve(fd, 0, nbytes)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def grow(self, nbytes: int) -> None:
        """Extends the segment to ``nbytes``. Refs stay valid, old views too (they keep the older
        mapping of the same pages).
        """
        if nbytes > self.nbytes:
            reserve(self.fd, self.nbytes, nbytes - self.nbytes)
            self.follow(nbytes)

    def follow(self, nbytes: int) -> None:
        """Maps the segment as far as another process has extended it."""
        if nbytes > self.nbytes:
            self._mapping = mmap.mmap(self.fd, nbytes)
            self.nbytes = nbytes
            if self.is_pinned and self._device is not None:
                self._register(self._device)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """Returns a view of the segment, not a copy."""
        dtype, count = dtype_named(ref.dtype), math.prod(ref.shape)
        if not count:  # frombuffer takes no empty range
            return torch.empty(ref.shape, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=ref.offset).view(ref.shape)

    def put(self, offset: int, tensor: torch.Tensor, version: int = 0, later: bool = False) -> TensorRef:
        """Writes a tensor. ``later``: a GPU may do so on its own, where the memory is pinned."""
        ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype), version)
        self.tensor(ref).copy_(tensor, non_blocking=later and self.is_pinned)
        return ref

    def fill(self, pieces: Sequence[tuple[int, int]], fd: int) -> None:
        """Fills places of the segment (offset, bytes) with what a file holds, one after another.
        Raises SharedMemoryFull where it holds less: there was no room for it.
        """
        at = 0
        for offset, nbytes in pieces:
            place = memoryview(self._mapping)[offset : offset + nbytes]
            while place:
                read = os.preadv(fd, [place], at)
                if not read:
                    raise SharedMemoryFull(
                        "Shared memory is full: what another machine sent could not be kept; close other"
                        " programs, or choose a smaller image or batch."
                    )
                place, at = place[read:], at + read

    def unmap(self) -> None:
        """Drops the mapping, which holds a descriptor of its own. Nothing can be read or written
        here any more; existing views stay.
        """
        self._mapping = b""

    def close(self) -> None:
        pinned, self._pinned, self.is_pinned = self._pinned, [], False
        with contextlib.suppress(RuntimeError):  # of a GPU that repeats an earlier error
            if pinned:
                torch.cuda.synchronize(self._device)
        for mapping in pinned:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(mapping.data_ptr())
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Raises SharedMemoryFull."""
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        raise SharedMemoryFull(
            f"Shared memory is full: {mib(nbytes)} more could not be reserved ({error.strerror}); close other"
            " programs, choose a smaller image or batch, or raise the memory limit of this container."
        ) from error
