"""Exchange tensors of unequal sizes among all ranks of a group, and agree on when to stop.

Each rank's wish to stop travels as one extra element behind every message of attention. So all
ranks learn of it at the same attention, and leave at the same block.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .in_step import Mover, Stopped
from .late import LateValue

LOOK_AHEAD = 8

Shape = tuple[int, ...]


class StopFlag:
    """Leave an evaluation at the same attention on all ranks. Each rank makes its flag once per
    attention and sends it along; every rank decides when it has all of them.

    On CUDA the flag is read ``LOOK_AHEAD`` attentions later, so that the CPU does not wait for the
    GPU; in an evaluation of few attentions, half of them later.
    """

    def __init__(self, wants_stop: Callable[[], bool]):
        self._wants_stop = wants_stop
        self._later: deque[LateValue] = deque()
        self._look_ahead = 0

    def begin(self, attentions: int) -> None:
        """Begin an evaluation of so many attentions."""
        self._later.clear()
        self._look_ahead = min(LOOK_AHEAD, attentions // 2)

    def wish(self, like: torch.Tensor) -> torch.Tensor:
        """Return the flag (1,) of ``like``'s dtype: 1 if this rank wishes to stop."""
        return like.new_full((1,), float(self._wants_stop()))

    def decide(self, flag: torch.Tensor) -> None:
        """Raise Stopped, on all ranks alike, if any wishes it: ``flag`` holds all wishes."""
        if flag.device.type == "cuda":
            self._later.append(LateValue(flag))
            stops = len(self._later) > self._look_ahead and self._later.popleft().read()
        else:
            stops = float(flag)
        if stops:
            raise Stopped


class Message(NamedTuple):
    """Elements to and from each rank of a group, the flag included; none for the own rank."""

    to: tuple[int, ...]
    come: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Places(NamedTuple):
    """Where a message lies: the whole of it, and the parts to and from each other rank, each with
    its flag behind it.
    """

    sending: torch.Tensor
    receiving: torch.Tensor
    to: dict[int, torch.Tensor]
    come: dict[int, torch.Tensor]
    own_flags: list[torch.Tensor]  # one (1,) in each part of ``to``
    flags: list[torch.Tensor]  # those of ``come``


class Exchange(Mover):
    """Moves tensors between the ranks of ``group``, all of which must make the same calls in the
    same order. ``rank`` and ``size`` are within the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, *, axis: str, via_cpu: bool):
        super().__init__(axis, size, via_cpu=via_cpu)
        self.rank = rank
        self.group = group

    def all_to_all(
        self, chunks: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Shape], flag: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Send the tensors ``chunks[j]`` to rank j; return one tensor of ``shapes[i]`` from each
        rank i, and the largest ``flag`` (1,) of the group. Raises Stopped where a rank has failed.

        The own chunk is not moved: its place in the result is empty. Results are views of a buffer
        that the next exchange reuses.
        """
        first = next(tensor for chunk in chunks for tensor in chunk)
        message = Message(
            tuple(
                sum(t.numel() for t in chunks[rank]) + 1 if rank != self.rank else 0
                for rank in range(self.size)
            ),
            tuple(math.prod(shapes[rank]) + 1 if rank != self.rank else 0 for rank in range(self.size)),
            first.dtype,
            torch.device("cpu") if self.via_cpu else first.device,
        )
        places = self._places(message)
        for rank, place in places.to.items():
            offset = 0
            for tensor in chunks[rank]:
                place[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
                offset += tensor.numel()
        room = self._flags(message.dtype, message.device)
        if self.in_step is not None:
            self.in_step.enter(self.axis, message)
        flag = self._pass(message, places, flag, room)
        if self.in_step is not None:
            self.in_step.leave_with(flag)
        received = [places.receiving[:0]] * self.size
        for rank, place in places.come.items():
            received[rank] = place[:-1].view(shapes[rank])
        return received, flag

    def make_room(self, what: Hashable) -> None:
        assert isinstance(what, Message)
        self._places(what)

    def go_through(self, what: Hashable, flag: torch.Tensor) -> torch.Tensor:
        assert isinstance(what, Message)
        return self._pass(what, self._places(what), flag, self._flags(what.dtype, what.device))

    def _pass(
        self,
        message: Message,
        places: Places,
        flag: torch.Tensor,
        room: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Move what lies in the places of ``message`` with ``flag``; return the group's largest, in
        ``room``.
        """
        wishes, largest = room
        wishes[:1].copy_(flag)
        for own_flag in places.own_flags:
            own_flag.copy_(wishes[:1])
        began = time.perf_counter()
        self._move(places.receiving, places.sending, message.come, message.to)
        self.traffic.waited_s[self.axis] += time.perf_counter() - began
        self.traffic.sent_bytes[self.axis] += places.sending.nbytes
        if places.flags:
            torch.cat(places.flags, out=wishes[1:])
        return torch.amax(wishes, 0, keepdim=True, out=largest)

    def _places(self, message: Message) -> Places:
        if message not in self._laid:
            sending = self._buffer("send", sum(message.to), message.dtype, message.device)
            receiving = self._buffer("receive", sum(message.come), message.dtype, message.device)
            to, come = (
                {rank: place for rank, place in enumerate(whole.split(counts)) if rank != self.rank}
                for whole, counts in ((sending, message.to), (receiving, message.come))
            )
            flags = ([place[-1:] for place in parts.values()] for parts in (to, come))
            self._laid[message] = Places(sending, receiving, to, come, *flags)
        return self._laid[message]

    def largest(self, flag: torch.Tensor) -> torch.Tensor:
        """Return the largest of each element of ``flag`` (n,) in the group, by a message that is no
        step.
        """
        flags = flag.repeat(self.size)
        if self.size > 1:
            counts = [flag.numel() * (rank != self.rank) for rank in range(self.size)]
            received = flag.new_zeros(sum(counts))
            self._exchange(received, flag.repeat(self.size - 1), counts, counts)
            self.traffic.sent_bytes[self.axis] += received.nbytes
            flags[flag.numel() :] = received
        return flags.view(self.size, -1).amax(0)

    def _move(
        self,
        receiving: torch.Tensor,
        sending: torch.Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> None:
        self._exchange(receiving, sending, receive_sizes, send_sizes)

    def _exchange(
        self,
        receiving: torch.Tensor,
        sending: torch.Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> None:
        if dist.get_backend(self.group) != "gloo":
            dist.all_to_all_single(
                receiving, sending, list(receive_sizes), list(send_sizes), group=self.group
            )
            return
        # gloo runs a collective on a thread of its own and a plain send on the caller's: two
        # switches of threads fewer at every exchange.
        works, pieces = [], zip(receiving.split(receive_sizes), sending.split(send_sizes), strict=True)
        for rank, (incoming, outgoing) in enumerate(pieces):
            if rank != self.rank:
                peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
                works += [dist.irecv(incoming, peer, self.group), dist.isend(outgoing, peer, self.group)]
        for work in works:
            work.wait()
