"""Pass keys and values around a ring of ranks: the next block travels while the current one is
computed with.

Source: Ring Attention (arXiv 2310.01889). K and V travel as one message, with the origin's wish to
stop as one extra element.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from .in_step import Flag, Mover


@dataclass(frozen=True)
class Block:
    """One rank's keys and values, and where they come from."""

    source: int  # its index in the ring
    # (2, B, h, K, D), where messages lie; a view of a buffer that is used again, valid until the
    # next block
    kv: torch.Tensor


class RingMessage(NamedTuple):
    """Elements of every rank's block, the flag not included."""

    counts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Ring(Mover):
    """Passes blocks among the ranks of ``group``, all of which must walk the ring together.
    ``ranks`` are their global ranks in ring order.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], index: int, *, via_cpu: bool):
        super().__init__("ring", len(ranks), via_cpu=via_cpu)
        self.index = index
        self._group = group
        self._next = ranks[(index + 1) % self.size]
        self._previous = ranks[(index - 1) % self.size]

    def walk(self, kv: torch.Tensor, keys: Sequence[int], flag: Flag) -> Iterator[Block]:
        """Yield every rank's block, the own one first. Walk it to its end: others wait for what is
        passed on, and the ranks' largest flag is that of ``in_step`` then. Raises Stopped where a
        rank has failed, before the first.

        ``kv`` (2, B, h, K, D); ``keys``: K of each rank of the ring; ``flag``: this rank's wish to
        stop.
        """
        shape = list(kv.shape)
        counts = tuple(shape[0] * shape[1] * shape[2] * count * shape[4] for count in keys)
        message = RingMessage(counts, kv.dtype, torch.device("cpu") if self.via_cpu else kv.device)
        places = self._places(message)
        places[0][: kv.numel()].copy_(kv.flatten())
        wishes, largest = self._flags(message.dtype, message.device)
        if self.in_step is not None:
            self.in_step.enter(self.axis, message)
        for step, (source, place) in enumerate(self._go_around(message, places, flag)):
            wishes[step : step + 1].copy_(place[-1:])
            block = place[:-1].view(*shape[:3], keys[source], shape[4])
            yield Block(source, kv if step == 0 else block)
        if self.in_step is not None:
            self.in_step.leave_with(torch.amax(wishes, 0, out=largest))

    def make_room(self, what: Hashable) -> None:
        assert isinstance(what, RingMessage)
        self._places(what)

    def go_through(self, what: Hashable, wish: float) -> torch.Tensor:
        """Walk the ring with whatever lies there as the own block; return the largest flag."""
        assert isinstance(what, RingMessage)
        places, (wishes, largest) = self._places(what), self._flags(what.dtype, what.device)
        for step, (_, place) in enumerate(self._go_around(what, places, wish)):
            wishes[step : step + 1].copy_(place[-1:])
        return torch.amax(wishes, 0, out=largest)

    def _go_around(
        self, message: RingMessage, places: Sequence[torch.Tensor], flag: Flag
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each block's source and its place, the flag behind it, while the next arrives."""
        current, source = places[0][: message.counts[self.index] + 1], self.index
        current[-1:].fill_(flag)
        for step in range(self.size):
            arriving, works, coming = current, [], (source - 1) % self.size
            if step < self.size - 1:
                arriving = places[1 + step % 2][: message.counts[coming] + 1]
                works = self._pass_on(current, arriving)
                self.traffic.sent_bytes[self.axis] += current.nbytes
            yield source, current
            began = time.perf_counter()
            for work in works:
                work.wait()
            self.traffic.waited_s[self.axis] += time.perf_counter() - began
            current, source = arriving, coming

    def _pass_on(self, current: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
        """Start a send and a receive; return them to be waited for."""
        operations = [
            dist.P2POp(dist.isend, current, self._next, self._group),
            dist.P2POp(dist.irecv, arriving, self._previous, self._group),
        ]
        return dist.batch_isend_irecv(operations)

    def _places(self, message: RingMessage) -> list[torch.Tensor]:
        """Return three buffers, used in turn: one is sent, one (the same, or the own block) is
        computed with, and into one the next block arrives. All are there before the first is sent.
        """
        if message not in self._laid:
            own, largest = message.counts[self.index] + 1, max(message.counts) + 1
            self._laid[message] = [
                self._buffer(slot, own if slot == 0 else largest, message.dtype, message.device)
                for slot in range(1 + min(2, self.size - 1))
            ]
        return self._laid[message]
