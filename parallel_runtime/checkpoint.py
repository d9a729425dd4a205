"""Makes sure that the UI and the ranks use the same checkpoint: they map the file, each for itself.

A file is told apart by its path, size and time of change.
"""

from __future__ import annotations

import os
import socket
import time

from .errors import ModelError, Refused

File = tuple[str, int, int, int]  # path, bytes, mtime_ns, inode


def stat_file(path: str) -> File:
    """Describes a checkpoint. Raises ModelError where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise ModelError(
            f"The checkpoint {path} is missing: put it back or choose another in the loader node."
        ) from None
    return (path, found.st_size, found.st_mtime_ns, found.st_ino)


def check_file(file: File | None) -> None:
    """To be called before a checkpoint is mapped. Raises Refused if it is missing or not the one
    that the UI loaded.
    """
    if file is None:
        return
    try:
        found = os.stat(file[0])
    except FileNotFoundError:
        raise Refused(
            f"The checkpoint {file[0]} is missing: put it back or choose another in the loader node."
        ) from None
    refuse_change(file, found)


def check_copy(path: str, size: int) -> None:
    """Raises Refused if the file is missing on this machine, or of another size than where ComfyUI
    runs. Its time may differ: a copy has one of its own.
    """
    machine = socket.gethostname()
    try:
        found = os.stat(path).st_size
    except FileNotFoundError:
        raise Refused(
            f"The checkpoint {path} is missing on machine {machine}: put it back or choose another in the"
            " loader node."
        ) from None
    if found != size:
        raise Refused(
            f"The checkpoint {path} has {found} bytes on machine {machine} and {size} where ComfyUI runs: "
            "copy the same file to every machine."
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
