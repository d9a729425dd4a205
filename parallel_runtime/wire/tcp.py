"""A channel to another machine over TCP: both ends prove a secret and say their version before the
first message. The content of descriptors is sent along.

The secret keeps strangers who reach the port from starting or steering ranks. Later traffic is
neither encrypted nor authenticated; torch.distributed's own traffic is not either.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from ..errors import SharedMemoryFull
from .channel import HEADER, Channel, ChannelClosed, close_all, noted
from .segment import reserve

# The exchange of secrets is that of version 0.1, to the byte: a peer of another version must come
# as far as saying so, and not look like one that holds another secret.
PROTOCOL = b"pipemesh-1"
Role = Literal[b"ui", b"host"]
COMFYUI: Role = b"ui"
LEADER: Role = b"host"
NONCE_BYTES, PROOF_BYTES = 32, 32
PARCEL = struct.Struct("<Q")
PIECE_BYTES = 1 << 20
BEAT_S = 1.0  # between two signs of life of a leader that owes an answer
MAX_HELLO_BYTES = 1 << 20


class SecretRefused(ConnectionError):
    """The other side does not hold the same secret."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message of each side: its version of PipeMesh and the name of its machine.

    Tag and fields never change, so that every later version can read them.
    """

    version: str
    machine: str


def shake_hands(sock: socket.socket, secret: str, role: Role, own: Hello, limit_s: float) -> Hello:
    """Proves the secret to the other side, has it proved, and exchanges versions. Returns the other
    side's Hello.

    Both ends must call it, one in each role. The leader speaks last, so that it tells a stranger
    nothing. ``limit_s`` seconds are the limit for all of it. Raises SecretRefused, TimeoutError,
    other OSErrors.
    """
    until, body = time.monotonic() + limit_s, msgspec.msgpack.encode(own)
    prove(sock, secret, role, until)
    if role == COMFYUI:
        send_before(sock, HEADER.pack(len(body), 0) + body, until)
    theirs = receive_hello(sock, until)
    if role == LEADER:
        send_before(sock, HEADER.pack(len(body), 0) + body, until)
    sock.settimeout(None)
    return theirs


def prove(sock: socket.socket, secret: str, role: Role, until: float) -> None:
    """Proves the secret to the other side and has it proved, before ``until`` of the monotonic
    clock.
    """
    mine = os.urandom(NONCE_BYTES)
    send_before(sock, mine, until)
    theirs = read_before(sock, NONCE_BYTES, until)
    nonces = mine + theirs if role == COMFYUI else theirs + mine
    own, other = proof(secret, role, nonces), proof(secret, LEADER if role == COMFYUI else COMFYUI, nonces)
    if role == COMFYUI:
        send_before(sock, own, until)
    if not hmac.compare_digest(read_before(sock, PROOF_BYTES, until), other):
        raise SecretRefused("the other side holds another secret")
    if role == LEADER:
        send_before(sock, own, until)


def proof(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), PROTOCOL + role + nonces, "sha256")


def receive_hello(sock: socket.socket, until: float) -> Hello:
    """Returns the other side's Hello. Raises ConnectionError if its first message is none."""
    length, _descriptors = HEADER.unpack(read_before(sock, HEADER.size, until))
    try:
        if length <= MAX_HELLO_BYTES:
            return msgspec.msgpack.decode(read_before(sock, length, until), type=Hello)
    except msgspec.DecodeError:
        pass
    raise ConnectionError("the other side does not say its version")


def send_before(sock: socket.socket, data: bytes, until: float) -> None:
    sock.settimeout(seconds_left(until))
    sock.sendall(data)


def read_before(sock: socket.socket, count: int, until: float) -> bytes:
    """Returns ``count`` bytes. Raises SecretRefused if the other side closes the connection, which
    is how it refuses a secret.
    """
    data = b""
    while len(data) < count:
        sock.settimeout(seconds_left(until))
        piece = sock.recv(count - len(data))
        if not piece:
            raise SecretRefused("the other side closed the connection")
        data += piece
    return data


def seconds_left(until: float) -> float:
    """Returns the seconds that are left. Raises TimeoutError if none are."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def notice_loss(sock: socket.socket, lost_s: float) -> None:
    """Has the kernel ask a silent peer once a second, and close the connection after ``lost_s``
    seconds without an answer.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(lost_s) - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * lost_s))


class Link(Channel):
    """A channel over TCP. A descriptor's content follows the message; at the other end it arrives
    in a new memfd, which the caller owns.

    ``no_room`` is the error if the content that came with the last message could not be kept.
    """

    no_room: SharedMemoryFull | None = None

    def __init__(self, sock: socket.socket, incoming: Any):
        super().__init__(sock, incoming)
        self._heard = time.monotonic()  # when something came, or was sent
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        # As ``notice_loss`` has set it; 0 for none
        self._lost_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) if is_tcp else 0

    def cut(self) -> None:
        """Closes the connection for both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def send(
        self,
        message: msgspec.Struct,
        fds: Sequence[int] = (),
        before_piece: Callable[[], None] = lambda: None,
        ranges: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Sends the message and the content of its descriptors, in pieces. ``ranges`` of files
        (descriptor, offset, bytes) follow as one more parcel. If ``before_piece`` raises, the
        message is cut off: then the link can only be closed.
        """
        own: list[int] = []
        body = msgspec.msgpack.encode(message, enc_hook=partial(noted, own))
        parcels = [[(fd, 0, os.fstat(fd).st_size)] for fd in (*own, *fds)] + [list(ranges)] * bool(ranges)
        try:
            self._sock.sendall(HEADER.pack(len(body), len(parcels)) + body)
            for parcel in parcels:
                self._sock.sendall(PARCEL.pack(sum(size for _fd, _at, size in parcel)))
                for fd, at, size in parcel:
                    end = at + size
                    while at < end:
                        before_piece()
                        sent = os.sendfile(self._sock.fileno(), fd, at, min(PIECE_BYTES, end - at))
                        if not sent:
                            raise ChannelClosed("the data to send are shorter than announced")
                        at += sent
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error
        self._heard = time.monotonic()

    def check(self) -> None:
        """Raises ChannelClosed if a peer that should speak has been silent for too long although it
        got all data: the kernel of a stopped process goes on answering.
        """
        # Our kernel tells of a lost connection first: it counts from the last that the other kernel
        # sent, at most a beat after the last message, and looks once a second; the third is spare
        limit_s = self._lost_ms / 1000 + 3 * BEAT_S
        is_silent = time.monotonic() - self._heard > limit_s and not self._readable.poll(0)
        if is_silent and not any(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))):
            raise ChannelClosed(f"nothing came for {limit_s:g} s")

    def _fill(self) -> None:
        try:
            super()._fill()
            self._heard = time.monotonic()
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
        """Returns the content of one descriptor as a memfd. It reads all bytes even if there is no
        room for them, because the next message follows.
        """
        (left,) = PARCEL.unpack(self._read(PARCEL.size))
        fd = os.memfd_create("pipemesh-parcel", os.MFD_CLOEXEC)
        try:
            try:
                reserve(fd, 0, left)
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
        """Blocks until so many bytes are there. Raises ChannelClosed if none comes for the time
        after which a peer counts as lost.
        """
        while len(self._buffer) < count:
            if self._lost_ms and not self._readable.poll(self._lost_ms):
                silence = f"nothing came for {self._lost_ms / 1000:.0f} s"
                raise ChannelClosed(f"{silence} in the middle of a message")
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
