"""Anonymous shared memory (memfd): nothing to unlink, gone with the last process that holds it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable

import msgspec
import torch

from ..errors import SharedMemoryFull

ALIGN = 64


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

    @classmethod
    def create(
        cls, name: str, nbytes: int, allocate: Callable[[int, int, int], None] = os.posix_fallocate
    ) -> Segment:
        """Makes a segment. Raises SharedMemoryFull when the system has no room: pages are reserved
        here, not at first touch.
        """
        fd = os.memfd_create(f"pipemesh-{name}", os.MFD_CLOEXEC)
        try:
            reserve(fd, 0, nbytes, allocate)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def grow(self, nbytes: int, allocate: Callable[[int, int, int], None] = os.posix_fallocate) -> None:
        """Extends the segment to ``nbytes``. Refs stay valid, old views too (they keep the older
        mapping of the same pages).
        """
        if nbytes > self.nbytes:
            reserve(self.fd, self.nbytes, nbytes - self.nbytes, allocate)
            self.follow(nbytes)

    def follow(self, nbytes: int) -> None:
        """Maps the segment as far as another process has extended it."""
        if nbytes > self.nbytes:
            self._mapping = mmap.mmap(self.fd, nbytes)
            self.nbytes = nbytes

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """Returns a view of the segment, not a copy."""
        dtype, count = dtype_named(ref.dtype), math.prod(ref.shape)
        if not count:  # frombuffer takes no empty range
            return torch.empty(ref.shape, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=ref.offset).view(ref.shape)

    def put(self, offset: int, tensor: torch.Tensor, version: int = 0) -> TensorRef:
        ref = TensorRef(offset, tuple(tensor.shape), dtype_name(tensor.dtype), version)
        self.tensor(ref).copy_(tensor)
        return ref

    def unmap(self) -> None:
        """Drops the mapping, which holds a descriptor of its own. Nothing can be read or written
        here any more; existing views stay.
        """
        self._mapping = b""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def reserve(fd: int, start: int, nbytes: int, allocate: Callable[[int, int, int], None]) -> None:
    try:
        allocate(fd, start, nbytes)
    except OSError as error:
        raise SharedMemoryFull(
            f"Shared memory is full: {mib(nbytes)} more could not be reserved ({error.strerror}); close other"
            " programs, choose a smaller image or batch, or raise the memory limit of this container."
        ) from error
