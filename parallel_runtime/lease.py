"""A read lease on a file: whoever opens it to write, or cuts it short, waits until it is given up.

The kernel tells of such a wish by a signal. Python's own handlers run in the main thread alone, and
only between its steps, so the signal goes to a thread that waits for nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

F_SETOWN_EX, F_OWNER_TID = 15, 0  # <fcntl.h>; Python has no names for them
BREAK_TIME = Path("/proc/sys/fs/lease-break-time")  # seconds that the kernel lets others wait; 0 for any time
PART_OF_IT = 0.75  # for the work before it is given up
# Of <linux/magic.h>: to which nobody writes but through this kernel. Elsewhere another machine may,
# without asking.
LOCAL = {
    "btrfs": 0x9123683E,
    "bcachefs": 0xCA451A4E,
    "exfat": 0x2011BAB0,
    "ext": 0xEF53,
    "f2fs": 0xF2F52010,
    "ntfs3": 0x7366746E,
    "overlay": 0x794C7630,
    "tmpfs": 0x01021994,
    "vfat": 0x4D44,
    "xfs": 0x58465342,
    "zfs": 0x2FC12FC1,
}


class Lease:
    """A read lease on a file, watched by a thread of its own until ``end``, or until another
    process wants to write.

    ``wanted`` is called in that thread, with the time (``time.monotonic``) by which it is to be
    done; the lease is given up when it returns. ``late`` is called where the kernel had taken the
    lease away by then.
    """

    def __init__(self, path: str, wanted: Callable[[float], None], late: Callable[[], None]):
        """Raises OSError where the system gives none: another user's file, one that is open to be
        written, a file system of another machine.
        """
        self._wanted = wanted
        self._late = late
        self._lock = threading.RLock()  # the garbage collector may call ``end`` at any place
        self._ended = False
        self._descriptor = os.open(path, os.O_RDONLY)
        self._refusal: OSError | None = OSError("no thread is left to watch a lease")
        tried = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(tried,), name="pipemesh-lease", daemon=True)
        try:
            if not is_local(self._descriptor):
                raise OSError("its file system belongs to another machine, or tells nobody of writers")
            with contextlib.suppress(RuntimeError):
                self._thread.start()
                tried.wait()
            if self._refusal is not None:
                raise self._refusal
        except OSError:
            os.close(self._descriptor)
            raise

    def end(self) -> None:
        """Gives it up. May be called again, and from any thread."""
        with self._lock:
            if not self._ended:
                self._ended = True
                signal.pthread_kill(self._thread.ident or 0, signal.SIGIO)

    def _watch(self, tried: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            fcntl.fcntl(
                self._descriptor, F_SETOWN_EX, struct.pack("ii", F_OWNER_TID, threading.get_native_id())
            )
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._refusal = None
        except OSError as error:
            self._refusal = error
            return
        finally:
            tried.set()
        while not self._ended and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            signal.sigwait({signal.SIGIO})
        with self._lock:
            asked, self._ended = not self._ended, True
        try:
            if asked:
                self._wanted(time.monotonic() + PART_OF_IT * seconds_that_others_wait())
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except BlockingIOError:  # there is none any more
            self._late()
        finally:
            os.close(self._descriptor)


def seconds_that_others_wait() -> float:
    """Returns how long the kernel waits for a lease to be given up."""
    return float(BREAK_TIME.read_text()) or math.inf


def is_local(descriptor: int) -> bool:
    """True if this kernel sees everyone who writes to the file."""
    found = (ctypes.c_long * 64)()  # struct statfs, whose first field is the type
    ok = ctypes.CDLL(None).fstatfs(descriptor, found) == 0
    return ok and found[0] & 0xFFFFFFFF in LOCAL.values()
