"""Length-framed, schema-checked messages over an inherited socket pair; descriptors ride along
(SCM_RIGHTS).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

HEADER = struct.Struct("<IB")  # length of the body, number of descriptors
MAX_FDS = 4


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a connection. ``incoming`` is the union of message types this end accepts;
    anything else raises msgspec.ValidationError.
    """

    def __init__(self, sock: socket.socket, incoming: Any):
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        body = msgspec.msgpack.encode(message)
        data = memoryview(HEADER.pack(len(body), len(fds)) + body)
        try:
            sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other side closed the channel") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Blocks for one whole message; returns it with the descriptors it carried, which the
        caller owns.
        """
        while (message := self._take()) is None:
            self._fill()
        return message

    def pump(self) -> Iterator[tuple[Any, list[int]]]:
        """Reads once (the socket must be readable) and yields the messages that are whole by now,
        each before the next is looked at: one that cannot be read takes none before it along.
        """
        self._fill()
        while (message := self._take()) is not None:
            yield message

    def _fill(self) -> None:
        try:
            data, fds, _flags, _address = socket.recv_fds(self._sock, 1 << 16, MAX_FDS)
        except ConnectionResetError as error:
            raise ChannelClosed("the other side closed the channel") from error
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data:
            raise ChannelClosed("the other side closed the channel")
        self._buffer += data

    def _take(self) -> tuple[Any, list[int]] | None:
        if len(self._buffer) < HEADER.size:
            return None
        length, count = HEADER.unpack_from(self._buffer)
        if len(self._buffer) < HEADER.size + length:
            return None
        body = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        fds = self._attached(count)
        try:
            return self._decoder.decode(body), fds
        except msgspec.DecodeError:
            close_all(fds)
            raise

    def _attached(self, count: int) -> list[int]:
        """Returns the descriptors of the message just read."""
        fds, self._fds = self._fds[:count], self._fds[count:]
        return fds

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        self._sock.close()


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
