"""Length-framed, schema-checked messages over an inherited socket pair. Descriptors travel with a
message (SCM_RIGHTS): first the descriptors of the message's own fields, then the others.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

HEADER = struct.Struct("<IB")  # length of the body, number of descriptors
MAX_FDS = 4


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Carried:
    """Owns a descriptor that crosses with the message that it is a field of; over TCP its content
    does. Whoever has it last closes it: of a message that nobody takes nothing is left.
    """

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Channel:
    """One end of a connection. ``incoming`` is the union of message types this end accepts;
    anything else raises msgspec.ValidationError.
    """

    def __init__(self, sock: socket.socket, incoming: Any):
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=self._carried)
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._of_message: list[int] = []  # of the message that is decoded

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        own: list[int] = []
        body = msgspec.msgpack.encode(message, enc_hook=partial(noted, own))
        fds = [*own, *fds]
        data = memoryview(HEADER.pack(len(body), len(fds)) + body)
        try:
            sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other side closed the channel") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Blocks for one whole message; returns it with its descriptors, which the caller owns."""
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
        self._of_message = self._attached(count)
        try:
            message = self._decoder.decode(body)
        except msgspec.DecodeError:
            close_all(self._of_message)
            raise
        return message, self._of_message

    def _carried(self, _type: type, _value: Any) -> Carried:
        if not self._of_message:
            raise ValueError("no descriptor came with it")
        return Carried(self._of_message.pop(0))

    def _attached(self, count: int) -> list[int]:
        """Returns the descriptors of the message just read."""
        fds, self._fds = self._fds[:count], self._fds[count:]
        return fds

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        self._sock.close()


def noted(fds: list[int], carried: Carried) -> bool:
    """Adds a field's descriptor to ``fds``. Returns what stands for it in the message's bytes."""
    fds.append(carried.fd)
    return True


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
