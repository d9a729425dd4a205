"""Pass keys and values around a ring of ranks: the next block travels while the current one is
computed with.

Source: Ring Attention (arXiv 2310.01889). K and V travel as one message, behind the origin's cancel
flag. A message does not overwrite the flag of the one before it in its place, so that one kernel
reads all flags at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from .parts import unit_of
from .traffic import Flag, Mover, Wish, no_wish


@dataclass(frozen=True)
class Block:
    """The keys and values of one rank, and the rank's index in the ring."""

    source: int  # its index in the ring
    # (2, B, h, K, D), where messages lie; a view of a buffer that is used again, valid until the
    # next block
    kv: torch.Tensor


class RingMessage(NamedTuple):
    """The form (2, B, h, D) of every rank's block, and the keys of each."""

    form: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Hop(NamedTuple):
    """The places of one block and of the message that brings it."""

    source: int
    message: torch.Tensor
    kv: torch.Tensor


class Route(NamedTuple):
    """The hops of a walk, and the places of their cancel flags among the flags of this rank."""

    hops: list[Hop]
    wishes: torch.Tensor


class Walk:
    """The blocks of all ranks of ``ring``. Walk it to its end: others wait for what is passed on.
    ``flag``: this rank's, at the end the largest of all.
    """

    def __init__(self, ring: Ring, places: Route, kv: torch.Tensor, flag: Flag):
        self.flag = flag
        self._ring = ring
        self._places = places
        self._kv = kv
        self._largest = places.wishes.new_empty(())

    def __iter__(self) -> Iterator[Block]:
        own, wishes = self._places.hops[0], self._places.wishes
        for hop in self._ring.go_around(self._places, self.flag):
            yield Block(hop.source, self._kv if hop is own else hop.kv)
        self.flag = torch.amax(wishes, (), out=self._largest)


class Ring(Mover):
    """Passes blocks among the ranks of ``group``, all of which must walk the ring together.
    ``ranks`` are their global ranks in ring order.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], index: int, *, via_cpu: bool):
        super().__init__("ring", len(ranks), via_cpu=via_cpu)
        self.index = index
        self._group = group
        self._ranks = ranks
        self._next, self._previous = (index + 1) % self.size, (index - 1) % self.size
        self._works: list[dist.Work] = []  # of the block that arrives
        self._message: AbstractContextManager[None] = nullcontext()  # all of a walk

    def walk(self, kv: torch.Tensor, keys: Sequence[int], flag: Flag) -> Walk:
        """Return every rank's block, the own one first. ``kv`` (2, B, h, K, D); ``keys``: K of each
        rank of the ring; ``flag``: this rank's cancel flag.
        """
        *form, _, dim = kv.shape
        device = torch.device("cpu") if self.via_cpu else kv.device
        places = self._places(RingMessage((*form, dim), tuple(keys), kv.dtype, device))
        places.hops[0].kv.copy_(kv)
        return Walk(self, places, kv, flag)

    def open(self, token: torch.Tensor) -> torch.Tensor:
        """Send ``token`` (1,) once around by the operation that messages use, and return the one
        that came.
        """
        came = torch.zeros_like(token)
        for work in self._pass_on(token, came):
            work.wait()
        return came

    def go_around(self, places: Route, flag: Flag) -> Iterator[Hop]:
        """Yield each hop while the next block arrives. All of them together are one message."""
        travels = isinstance(flag, torch.Tensor)
        places.wishes.fill_(flag if travels else 0.0)
        wish = no_wish if travels else flag
        for step, (hop, following) in enumerate(pairwise(places.hops)):
            written = () if step else (hop.kv, places.wishes)  # later blocks came from others
            self.traffic.perform(partial(self._start, places, step, wish), written)
            yield hop
            self.traffic.perform(partial(self._finish, step), (), [following.message])
        yield places.hops[-1]

    def _start(self, places: Route, step: int, wish: Wish) -> None:
        if step == 0:
            self._message = self.traffic.message(self.axis)
            self._message.__enter__()
            if wish():
                places.wishes.fill_(1.0)
        current, arriving = (hop.message for hop in places.hops[step : step + 2])
        self._works = self._pass_on(current, arriving)
        self.traffic.sent_bytes[self.axis] += current.nbytes

    def _finish(self, step: int) -> None:
        began = time.perf_counter()
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self.traffic.waited_s[self.axis] += time.perf_counter() - began
        if step == self.size - 2:
            self._message.__exit__(None, None, None)

    def _pass_on(self, current: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
        """Start a send to the next rank and a receive from the previous one. NCCL starts one kernel
        for both, by one call of torch: it skips ranks whose parts are empty.
        """
        if dist.get_backend(self._group) == "gloo":
            works = [
                dist.isend(current, self._ranks[self._next], self._group),
                dist.irecv(arriving, self._ranks[self._previous], self._group),
            ]
        else:
            sent, received = [0] * self.size, [0] * self.size
            sent[self._next], received[self._previous] = current.numel(), arriving.numel()
            works = [dist.all_to_all_single(arriving, current, received, sent, self._group, async_op=True)]
        return works  # pyright: ignore[reportReturnType] none is missing: this rank is in the group

    def _places(self, message: RingMessage) -> Route:
        """Return three places, used in turn: one is sent, one (the same, or the own block) is
        computed with, and into one the next block arrives.

        The messages of a place begin one unit apart, the last one's at the same unit in each. The
        own wish stands wherever no message has its own.
        """
        if message not in self._laid:
            unit, turns = unit_of(message.dtype), max(1, self.size // 2)
            counts = [prod(message.form) * keys for keys in message.keys]
            stride = -(-(turns * unit + max(counts)) // unit) * unit
            slots = min(3, self.size)
            buffer = self._buffer("walk", slots * stride, message.dtype, message.device)
            *form, dim = message.form
            hops = []
            for step in range(self.size):
                source = (self.index - step) % self.size
                slot, later = (2 - step % 2, (self.size - 1 - step) // 2) if step else (0, 0)
                begin = slot * stride + (turns - 1 - later) * unit
                whole = buffer[begin : begin + unit + counts[source]]
                hops.append(Hop(source, whole, whole[unit:].view(*form, message.keys[source], dim)))
            self._laid[message] = Route(hops, buffer.as_strided((slots, turns), (stride, unit)))
        return self._laid[message]
