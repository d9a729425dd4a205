"""An exchange among processes whose parts lie in shared memory on their way: copy engines carry
them, numbers in the memory say how far each is, no kernel runs, and no CPU waits.

A rank copies its part for another into a slot, then writes the slot's number; the other waits for
that number, copies the part in, and writes the same number as taken. A slot is filled again once
the number before the last is taken. All that is asked lies in queues of a device: an ``Engine``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

OUT, IN = 0, 1  # queues of an engine: to the shared memory, and from it
SLOTS = 2  # for each two ranks and direction: one is filled while the other is taken
LINE = 128  # bytes: a number has a line of its own
PAGE = 4096
AHEAD = 1 << 30  # of what a number says: it then counts as passed
WRAP = 1 << 32
POLL_S = 20e-6


@dataclass(frozen=True)
class Room:
    """Where the numbers and slots of ``ranks`` lie in the segment that they share."""

    ranks: int
    slot_bytes: int

    @property
    def numbers(self) -> range:
        return range(0, 2 * self.ranks**2 * LINE, LINE)

    @property
    def nbytes(self) -> int:
        return self._slots + self.ranks * (self.ranks - 1) * SLOTS * self.slot_bytes

    @property
    def _slots(self) -> int:
        return -(-len(self.numbers) * LINE // PAGE) * PAGE

    def sent(self, source: int, target: int) -> int:
        """Return where the number of the last part is that lies ready for ``target``."""
        return 2 * (source * self.ranks + target) * LINE

    def taken(self, source: int, target: int) -> int:
        """Return where the number of the last part is that ``target`` has copied."""
        return self.sent(source, target) + LINE

    def slot(self, source: int, target: int, number: int) -> int:
        pair = source * (self.ranks - 1) + target - (target > source)
        return self._slots + (pair * SLOTS + number % SLOTS) * self.slot_bytes


class Engine(Protocol):
    """What copies, and keeps numbers, in two queues beside the caller's own, each done in order.

    ``base``: the address of the segment, as the device knows it.
    """

    base: int

    def begin(self) -> None:
        """Have both queues wait for what the caller has asked of the device."""

    def copy(self, queue: int, to: int, source: int, nbytes: int) -> None: ...

    def write(self, queue: int, offset: int, number: int) -> None:
        """Write a number behind all that the queue was asked before."""

    def wait(self, queue: int, offset: int, number: int) -> None:
        """Have the queue do nothing more before the number there has come to ``number``."""

    def end(self) -> None:
        """Have what the caller asks next wait for both queues."""

    def close(self) -> None: ...


class Staged:
    """All-to-all among the ranks of a room. All must make the same calls in the same order.

    The order in which a rank asks for sends and receives would also do if each was over before the
    next is asked for, so a device may do both queues in one.
    """

    def __init__(self, engine: Engine, room: Room, rank: int):
        self._engine, self._room, self.rank = engine, room, rank
        self._sent = [0] * room.ranks  # the number of the last part to each rank
        self._come = [0] * room.ranks

    def all_to_all(
        self, into: torch.Tensor, out: torch.Tensor, into_sizes: Sequence[int], out_sizes: Sequence[int]
    ) -> None:
        """Send each rank its part of ``out``, one behind another, and receive each rank's part at
        its place of ``into``. Sizes are in elements, and both tensors are contiguous.
        """
        ranks, size, each = self._room.ranks, self._room.slot_bytes, out.element_size()
        to, come = starts(out.data_ptr(), out_sizes, each), starts(into.data_ptr(), into_sizes, each)
        pieces = -(-max(*into_sizes, *out_sizes) * each // size)
        self._engine.begin()
        self._engine.copy(IN, come[self.rank], to[self.rank], out_sizes[self.rank] * each)
        for at in range(0, pieces * size, size):
            for turn in range(1, ranks):
                other = (self.rank + turn) % ranks
                if (left := out_sizes[other] * each - at) > 0:
                    self._send(other, to[other] + at, min(size, left))
            for turn in range(1, ranks):
                other = (self.rank - turn) % ranks
                if (left := into_sizes[other] * each - at) > 0:
                    self._receive(other, come[other] + at, min(size, left))
        self._engine.end()

    def _send(self, other: int, address: int, nbytes: int) -> None:
        engine, room, number = self._engine, self._room, self._sent[other] + 1
        if number > SLOTS:
            engine.wait(OUT, room.taken(self.rank, other), number - SLOTS)
        engine.copy(OUT, engine.base + room.slot(self.rank, other, number), address, nbytes)
        engine.write(OUT, room.sent(self.rank, other), number)
        self._sent[other] = number

    def _receive(self, other: int, address: int, nbytes: int) -> None:
        engine, room, number = self._engine, self._room, self._come[other] + 1
        engine.wait(IN, room.sent(other, self.rank), number)
        engine.copy(IN, address, engine.base + room.slot(other, self.rank, number), nbytes)
        engine.write(IN, room.taken(other, self.rank), number)
        self._come[other] = number


def starts(address: int, sizes: Sequence[int], each: int) -> list[int]:
    """Return where each part begins."""
    return [address + sum(sizes[:rank]) * each for rank in range(len(sizes))]


class PlainEngine:
    """The CPU: each act is over when its call returns. ``address``: of the mapped segment."""

    def __init__(self, address: int):
        self.base = address

    def begin(self) -> None:
        pass

    def copy(self, queue: int, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def write(self, queue: int, offset: int, number: int) -> None:
        number_at(self.base + offset).value = number % WRAP

    def wait(self, queue: int, offset: int, number: int) -> None:
        there = number_at(self.base + offset)
        while not has_passed(there.value, number):
            time.sleep(POLL_S)

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def number_at(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def has_passed(there: int, number: int) -> bool:
    """Return whether ``there`` is at ``number`` or past it, as a device compares: numbers wrap."""
    return (there - number) % WRAP < WRAP // 2


def release(address: int, room: Room) -> None:
    """Have every queue that waits in a room go on, whatever has come: one of its ranks is lost, and
    the room is of no more use. ``address``: of the segment as this process has mapped it.
    """
    for offset in room.numbers:
        there = number_at(address + offset)
        there.value = (there.value + AHEAD) % WRAP
