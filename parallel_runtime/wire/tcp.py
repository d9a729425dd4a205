"""A channel to another host: TCP, with a secret proved by both ends before the first message, and
what descriptors hold sent along.

The secret keeps strangers from starting or steering ranks. What follows travels in the clear, as
torch.distributed's own traffic does.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ..errors import SharedMemoryFull
from .channel import HEADER, Channel, ChannelClosed, close_all
from .segment import reserve

VERSION = b"pipemesh-1"
NONCE_BYTES, PROOF_BYTES = 32, 32
PARCEL = struct.Struct("<Q")
PIECE_BYTES = 1 << 20

Role = Literal[b"ui", b"host"]


class SecretRefused(ConnectionError):
    """The other side does not hold the same secret."""


def prove(sock: socket.socket, secret: str, role: Role) -> None:
    """Both ends must call it, one in each role; the one that listens speaks last. Raises
    SecretRefused, OSError.
    """
    mine = os.urandom(NONCE_BYTES)
    sock.sendall(mine)
    theirs = read_exactly(sock, NONCE_BYTES)
    nonces = mine + theirs if role == b"ui" else theirs + mine
    own, other = (_proof(secret, side, nonces) for side in ((b"ui", b"host") if role == b"ui" else (b"host", b"ui")))
    if role == b"ui":
        sock.sendall(own)
    if not hmac.compare_digest(read_exactly(sock, PROOF_BYTES), other):
        raise SecretRefused("the other side holds another secret")
    if role == b"host":
        sock.sendall(own)


def _proof(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), VERSION + role + nonces, "sha256")


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise SecretRefused("the other side closed the connection")
        data += piece
    return data


def notice_loss(sock: socket.socket, lost_s: float) -> None:
    """The kernel asks a silent peer once a second, and gives the connection up when ``lost_s``
    brought no sign of it.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(lost_s) - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * lost_s))


class Link(Channel):
    """A descriptor's content goes after the message; at the other end it is a memfd of its own,
    which the caller owns.

    ``no_room``: why the content that came with the last message could not be kept.
    """

    no_room: SharedMemoryFull | None = None

    def send(self, message: msgspec.Struct, fds: Sequence[int] = (), before_piece: Callable[[], None] = lambda: None) -> None:
        """If ``before_piece`` raises, the message is cut off: then the link can only be closed."""
        body = msgspec.msgpack.encode(message)
        try:
            self._sock.sendall(HEADER.pack(len(body), len(fds)) + body)
            for fd in fds:
                size = os.fstat(fd).st_size
                self._sock.sendall(PARCEL.pack(size))
                sent = 0
                while sent < size:
                    before_piece()
                    sent += os.sendfile(self._sock.fileno(), fd, sent, PIECE_BYTES)
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error

    def _fill(self) -> None:
        try:
            super()._fill()
        except ChannelClosed as error:
            raise ChannelClosed("it closed the connection") from error
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error

    def _attached(self, count: int) -> list[int]:
        fds: list[int] = []
        self.no_room = None
        try:
            for _ in range(count):
                fds.append(self._parcel())
        except BaseException:
            close_all(fds)
            raise
        return fds

    def _parcel(self) -> int:
        """Read to its end whether there is room for it or not: the next message comes behind it."""
        (left,) = PARCEL.unpack(self._read(PARCEL.size))
        fd = os.memfd_create("pipemesh-parcel", os.MFD_CLOEXEC)
        try:
            try:
                reserve(fd, 0, left, os.posix_fallocate)
            except SharedMemoryFull as error:
                self.no_room = error
            while left:
                piece = self._read(min(left, PIECE_BYTES))
                left -= len(piece) if self.no_room else os.write(fd, piece)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read(self, count: int) -> bytes:
        """Blocks until so many bytes are there."""
        while len(self._buffer) < count:
            self._fill()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def finish(self, wait_s: float) -> None:
        """Closes this side, and waits until the other has closed too or ``wait_s`` is over."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(wait_s)
            while self._sock.recv(1 << 16):
                pass
        except OSError:
            pass  # it is gone, or does not hurry
        self.close()
