"""Makes sure that the UI and the ranks use the same checkpoint: each rank maps the file for itself.

A file is told apart by its path, size and time of change; on another machine by its size and ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

from .errors import ModelError, PipeMeshError, Refused

File = tuple[str, int, int, int]  # path, bytes, mtime_ns, inode
END_BYTES = 1 << 20


def stat_file(path: str) -> File:
    """Describes a checkpoint. Raises ModelError if there is none."""
    found = found_at(path, ModelError)
    return (path, found.st_size, found.st_mtime_ns, found.st_ino)


def found_at(path: str, missing: type[PipeMeshError]) -> os.stat_result:
    """Returns the system's record of a checkpoint file (``os.stat``). Raises ``missing`` if there
    is none.
    """
    try:
        return os.stat(path)
    except FileNotFoundError:
        raise missing(
            f"The checkpoint {path} is missing: put it back or choose another in the loader node."
        ) from None


def check_file(file: File | None) -> None:
    """To be called before a checkpoint is mapped. Raises Refused if it is missing or not the one
    that the UI loaded.
    """
    if file is not None:
        refuse_change(file, found_at(file[0], Refused))


def ends_of(path: str) -> bytes:
    """Returns a digest of a file's first and last MiB. Raises FileNotFoundError."""
    with open(path, "rb") as file:
        digest = hashlib.blake2b(file.read(END_BYTES), digest_size=16)
        file.seek(max(0, os.fstat(file.fileno()).st_size - END_BYTES))
        digest.update(file.read(END_BYTES))
    return digest.digest()


def check_copy(here: str, file: File, ends: bytes) -> None:
    """Raises Refused unless the file ``here``, on another machine, has the size and the ``ends`` of
    ComfyUI's ``file``. Its time may differ: a copy has one of its own.
    """
    path, size, *_ = file
    there = f"{here} on machine {socket.gethostname()}"
    try:
        found = os.path.getsize(here), ends_of(here)
    except FileNotFoundError:
        raise Refused(
            f"The checkpoint {path} of ComfyUI's machine is missing as {there}: copy it there, or choose"
            " another in the loader node."
        ) from None
    if found != (size, ends):
        how = f"{found[0]} bytes, not {size}" if found[0] != size else "as many bytes, but different ones"
        raise Refused(
            f"The checkpoint {there} differs from {path} of ComfyUI's machine ({how}): copy the same file to"
            " every machine."
        )


def check_mapped(file: File | None) -> None:
    """To be called while a checkpoint is mapped. Raises Refused if it was overwritten in place.

    A deleted or replaced file lives on in the processes that have it mapped.
    """
    if file is None:
        return
    try:
        found = os.stat(file[0])
    except FileNotFoundError:
        return
    if found.st_ino == file[3]:
        refuse_change(file, found)


def refuse_change(file: File, found: os.stat_result) -> None:
    """Raises Refused if size or time differ from ``file``'s."""
    path, size, mtime_ns, _inode = file
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        then, now = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp // 10**9))
            for stamp in (mtime_ns, found.st_mtime_ns)
        )
        raise Refused(
            f"The checkpoint {path} changed on disk since it was loaded ({size} bytes of {then} then,"
            f" {found.st_size} of {now} now): unload models and execution cache in ComfyUI's menu and run"
            " again."
        )
