"""Exchange tensors of unequal sizes among all ranks of a group, agree on when to stop, and compare
the sizes that the ranks are about to compute.

The cancel flag of each rank travels behind its parts of an attention's message. So all ranks learn
of a cancel at the same attention, and leave at the same block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import ModelError
from .device_copies import LateValue
from .parts import Parts, TensorRuns, counts_of, flags_of, padded
from .shares import Shares
from .traffic import Flag, Mover, Stopped, Unlike, Wish, at_once, digest, no_wish

LOOK_AHEAD = 8
MOST_COMPARED = 4096  # parts of runs: windows that shift are new parts at every step


class StopFlag:
    """Leaves one evaluation at the same attention on all ranks: each rank sends its wish along once
    per attention, and decides when it has all of them.

    On CUDA the flag is read ``LOOK_AHEAD`` attentions later, so that the CPU does not wait for the
    GPU; in an evaluation of few attentions, half of them later. ``look`` does what no kernel has a
    part in, before the next message.
    """

    look: Callable[[Callable[[], None]], None] = staticmethod(at_once)

    def __init__(self, wants_stop: Callable[[], bool], attentions: int = 0):
        self.wants_stop = wants_stop
        self._later: deque[LateValue] = deque()
        self._look_ahead = min(LOOK_AHEAD, attentions // 2)

    def decide(self, flag: Flag) -> None:
        """Raises Stopped, on all ranks alike, if any was cancelled: ``flag`` is the largest of all
        flags.
        """
        if isinstance(flag, torch.Tensor) and flag.device.type == "cuda":
            self._later.append(LateValue(flag))
            stops = len(self._later) > self._look_ahead and self._later.popleft().read()
        else:
            stops = bool(flag) if isinstance(flag, torch.Tensor) else flag()
        if stops:
            raise Stopped


class Message(NamedTuple):
    """Elements to and from each rank of a group, the own one too. ``is_flagged``: whether wishes to
    stop go along.
    """

    to: tuple[int, ...]
    come: tuple[int, ...]
    is_flagged: bool
    dtype: torch.dtype
    device: torch.device


class Places(NamedTuple):
    """The buffers of a message, with the places of its parts. A rank's own part is among them,
    because NCCL moves it in the kernel that moves the others. ``written``: what is written before
    the message goes out; the rest of ``to`` is padding.
    """

    to: Parts
    come: Parts
    room: tuple[torch.Tensor, torch.Tensor] | None  # for all flags that came, and for the largest
    written: tuple[torch.Tensor, ...] = ()


class Exchange(Mover):
    """Moves tensors between the ranks of ``group``, all of which must make the same calls in the
    same order. ``rank`` and ``size`` are within the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, *, axis: str, via_cpu: bool):
        super().__init__(axis, size, via_cpu=via_cpu)
        self.rank = rank
        self.group = group

    @property
    def buffers(self) -> list[torch.Tensor]:
        rooms = [places.room for places in self._laid.values() if places.room is not None]
        return [*super().buffers, *(flags for room in rooms for flags in room)]

    def all_to_all(self, sent: Sequence[TensorRuns], into: TensorRuns, wish: Wish | None = None) -> Flag:
        """Send each rank its part of all tensors ``sent``, one after another, and receive each
        rank's part at its place of ``into``. Return the group's largest cancel flag ``wish``;
        ``no_wish`` if none travels with this message.
        """
        message = Message(
            counts_of(sent),
            counts_of([into]),
            wish is not None,
            into[0].dtype,
            torch.device("cpu") if self.via_cpu else into[0].device,
        )
        places = here = self._places(message)
        if message.device != into[0].device:  # one copy crosses each way, from or to pinned memory
            to, come = (one.at(into[0].new_empty(len(one.buffer))) for one in (places.to, places.come))
            here = Places(to, come, None)
        here.to.put(sent)
        if here is not places:
            places.to.buffer.copy_(here.to.buffer)
        flag = self._pass(places, wish or no_wish)
        if here is not places:
            here.come.buffer.copy_(places.come.buffer)
        here.come.take(into)
        return no_wish if flag is None else flag

    def _pass(self, places: Places, wish: Wish) -> torch.Tensor | None:
        """Move the content of ``places``. Return the group's largest flag; None if none travels."""
        for flags in places.to.flags:
            flags.zero_()
        self.traffic.perform(partial(self._move, places, wish), places.written, [places.come.buffer])
        if places.room is None:
            return None
        came, (wishes, largest) = places.come.flags, places.room
        return torch.amax(came[0] if len(came) == 1 else torch.cat(came, out=wishes), 0, out=largest)

    def _move(self, places: Places, wish: Wish) -> None:
        if places.to.flags and wish():
            for flags in places.to.flags:
                flags.fill_(1.0)
        began = time.perf_counter()
        with self.traffic.message(self.axis):
            self._exchange(places.come.buffer, places.to.buffer, places.come.sizes, places.to.sizes)
        self.traffic.waited_s[self.axis] += time.perf_counter() - began
        elements = places.to.buffer.numel() - places.to.sizes[self.rank]
        self.traffic.sent_bytes[self.axis] += elements * places.to.buffer.element_size()

    def _places(self, message: Message) -> Places:
        if message not in self._laid:
            to, come = (
                padded(counts, message.is_flagged, message.dtype) for counts in (message.to, message.come)
            )
            sending = self._buffer("send", sum(to), message.dtype, message.device)
            receiving = self._buffer("receive", sum(come), message.dtype, message.device)
            room = self._flags(message.dtype, message.device) if message.is_flagged else None
            parts = (
                Parts(buffer, sizes, flags_of(buffer, sizes) if message.is_flagged else [], {})
                for buffer, sizes in ((sending, to), (receiving, come))
            )
            starts = accumulate(to, initial=0)
            own = [
                sending[start : start + count]
                for start, count in zip(starts, message.to, strict=False)
                if count
            ]
            leaving, coming = parts
            self._laid[message] = Places(leaving, coming, room, (*own, *leaving.flags))
        return self._laid[message]

    def largest(self, flag: torch.Tensor) -> torch.Tensor:
        """Return the group's largest of each element of ``flag`` (n,)."""
        flags = flag.repeat(self.size)
        if self.size > 1:
            counts = [flag.numel() * (rank != self.rank) for rank in range(self.size)]
            received = flag.new_zeros(sum(counts))
            with self.traffic.message(self.axis):
                self._exchange(received, flag.repeat(self.size - 1), counts, counts)
            self.traffic.sent_bytes[self.axis] += received.nbytes
            flags[flag.numel() :] = received
        return flags.view(self.size, -1).amax(0)

    def swap(self, sent: torch.Tensor, came: torch.Tensor | None = None) -> torch.Tensor:
        """Send each rank its row of ``sent`` (ranks, n), and return the received rows, in ``came``
        if that is given. With fewer rows each group of so many neighbours does so for itself. It is
        not counted.
        """
        ranks = len(sent)
        first = self.rank // ranks * ranks
        counts = [sent.shape[1] if first <= rank < first + ranks else 0 for rank in range(self.size)]
        came = torch.zeros_like(sent) if came is None else came
        self._exchange(came.view(-1), sent.view(-1), counts, counts)
        return came

    def _exchange(
        self,
        receiving: torch.Tensor,
        sending: torch.Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> None:
        if dist.get_backend(self.group) != "gloo":
            dist.all_to_all_single(receiving, sending, receive_sizes, send_sizes, group=self.group)
            return
        # gloo runs a collective on a thread of its own and a plain send on the caller's: two
        # switches of threads fewer at every exchange.
        works, pieces = [], zip(receiving.split(receive_sizes), sending.split(send_sizes), strict=True)
        for rank, (incoming, outgoing) in enumerate(pieces):
            peer = rank if self.group is None else dist.get_global_rank(self.group, rank)
            if rank == self.rank:
                incoming.copy_(outgoing)
                continue
            if incoming.numel():
                works.append(dist.irecv(incoming, peer, self.group))
            if outgoing.numel():
                works.append(dist.isend(outgoing, peer, self.group))
        for work in works:
            work.wait()


class Comparison:
    """Compares the sizes of each part of a run once, among the ranks that compute the part, which
    all remember the same comparisons. ``part``: of the present evaluation.
    """

    def __init__(self) -> None:
        self.part: Hashable = ()
        self._known: dict[Exchange, set[Hashable]] = {}

    def compare(
        self, ranks: Exchange, tokens: Hashable, count: int, shares: Shares, device: torch.device
    ) -> None:
        """Compare among ``ranks``, all of which must call it, which ``tokens`` each computes,
        ``count`` of them, and the shares that each takes. Only the first evaluation of a part sends
        a message, on ``device``. Raises Unlike on all ranks if they differ.
        """
        if ranks.size == 1:
            return
        known = self._known.setdefault(ranks, set())
        if self.part in known:
            return
        own = [count, digest(tokens), digest(shares)]
        told = torch.tensor([*own, *(-one for one in own)], device=device)
        *most, least, tokens_least, shares_least = ranks.largest(told).tolist()
        if most == [-least, -tokens_least, -shares_least]:
            if len(known) >= MOST_COMPARED:
                known.clear()
            known.add(self.part)
            return
        what = f"the tokens that they compute ({-least} on one, {most[0]} on another)"
        if most[:2] == [-least, -tokens_least]:
            what = "the shares that each takes"
        raise Unlike(
            ModelError(
                f"The workers of one image differ in {what}: queue again, and if they differ again, bypass"
                " Parallelize for this MODEL and report it."
            )
        )
