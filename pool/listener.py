"""Take a leader's connections. A stranger can open some, but neither hold them nor use them up."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

from ..parallel_runtime.wire.messages import ToMachine
from ..parallel_runtime.wire.tcp import LEADER, Hello, Link, notice_loss, shake_hands
from .leader import LentRanks
from .rank_setup import RankSetup
from .rendezvous import version_conflict

MOST_UNPROVED = 16
EVERY_S = 60.0  # a line of the log that strangers can cause
RETRY_S = 1.0
CLOSED = (errno.EBADF, errno.EINVAL)  # or shut down
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = logging.getLogger("pipemesh")


class Unproved:
    """The connections whose other side has not proved the secret yet, oldest first. There are at
    most ``most``: the oldest is cut off for a newer one, so that strangers who say nothing keep
    nobody out.
    """

    def __init__(self, most: int = MOST_UNPROVED):
        self._most = most
        self._socks: list[socket.socket] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, sock: socket.socket) -> Iterator[None]:
        """Counts ``sock`` among the unproved connections inside the block. While too many are open,
        the oldest is cut off.
        """
        with self._changed:
            self._socks.append(sock)
            while len(self._socks) > self._most:
                self._cut_oldest()
        try:
            yield
        finally:
            with self._changed:
                if sock in self._socks:
                    self._socks.remove(sock)
                self._changed.notify_all()

    def make_room(self, wait_s: float) -> None:
        """Cuts the oldest off, and waits a moment until it, or another, has been closed."""
        with self._changed:
            if self._socks:
                self._cut_oldest()
            self._changed.wait(wait_s)

    def _cut_oldest(self) -> None:
        with contextlib.suppress(OSError):  # its other side has just closed it
            self._socks.pop(0).shutdown(socket.SHUT_RDWR)


class SeldomLog:
    """Writes a warning at once. Of the warnings that follow within ``every_s`` seconds it only
    writes the number, with the next warning: strangers cannot fill a disk with lines.
    """

    def __init__(self, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic):
        self._every_s = every_s
        self._now = now
        self._last = -math.inf
        self._left_out = 0
        self._lock = threading.Lock()

    def warn(self, text: str) -> None:
        with self._lock:
            now = self._now()
            if now - self._last < self._every_s:
                self._left_out += 1
                return
            left_out, self._left_out, self._last = self._left_out, 0, now
        log.warning(
            "[PipeMesh] %s%s", text, f" ({left_out} more such lines were left out)" if left_out else ""
        )


def accept(listener: socket.socket, own: Hello, setup: RankSetup, unproved: Unproved | None = None) -> None:
    """Takes connections until the listener is closed. ``own`` is this leader's hello.

    If descriptors, threads or memory have run out, newcomers wait until there are some again, and
    the pools that are open go on. Raises OSError if no connection can ever be taken: torchrun then
    starts this leader again.
    """
    unproved, strangers, shortages, waits = unproved or Unproved(), SeldomLog(), SeldomLog(), False
    while True:
        try:
            sock, (peer, *_) = listener.accept()
            waits = False
        except ConnectionAbortedError:  # by its other side, while it waited
            continue
        except OSError as error:
            if error.errno in CLOSED:
                return
            if error.errno not in NO_ROOM:
                raise
            if not waits:
                shortages.warn(f"no connection can be taken ({error.strerror}): newcomers wait")
            waits = True
            unproved.make_room(RETRY_S)
            continue
        thread = threading.Thread(
            target=serve,
            args=(sock, peer, own, setup, unproved, strangers),
            name="pipemesh-lent",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            strangers.warn(f"{peer} was turned away: {error}")
            sock.close()


def serve(
    sock: socket.socket, peer: str, own: Hello, setup: RankSetup, unproved: Unproved, strangers: SeldomLog
) -> None:
    """Serves one connection to its end, in a thread of its own."""
    with contextlib.closing(sock):
        try:
            with unproved.hold(sock):
                comfyui = shake_hands(sock, setup.secret, LEADER, own, setup.lost_s)
        except OSError as error:
            strangers.warn(f"{peer} was turned away: {error}")
            return
        notice_loss(sock, setup.lost_s)
        link = Link(sock, ToMachine)
        if conflict := version_conflict(own.machine, own, comfyui):
            log.warning("[PipeMesh] %s was turned away: %s", peer, conflict)
            return
        log.info("[PipeMesh] %s opens a pool", peer)
        LentRanks(link, sock.getsockname()[0], setup).run()
        log.info("[PipeMesh] the pool of %s is closed; waiting for the next", peer)
