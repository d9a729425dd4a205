"""Send the hidden rows of patches from one stage of a pipeline to the next, in the order in which
patches were submitted.

A stage receives once and sends once for every patch, also for one that fails there if the stage is
one rank, so both ends agree on what comes next; else the pool ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .device_copies import LateValue
from .traffic import Traffic

CHUNK_BYTES = 32 << 20  # transports stall above 64 MiB
IN_FLIGHT = 4  # sends whose memory is kept
CHECKED_LATER = 2  # patches, on CUDA: the CPU does not wait for a patch to know whose it is
NUMBERS = 128  # each is exact in every dtype that hidden rows have
OUT_OF_STEP = "the stages of the pipeline are out of step"
AXIS = "pipefusion"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of hidden rows

Works = Sequence["dist.Work | None"]  # torch's type: None where this rank is not of the group


class Sends:
    """The sends in flight to one rank, whose memory is kept until they have gone."""

    def __init__(self, to: int | None, group: dist.ProcessGroup | None, traffic: Traffic):
        self._to = to
        self._group = group
        self._sending: deque[tuple[Works, torch.Tensor]] = deque()
        self._traffic = traffic

    def start(self, buffer: torch.Tensor) -> None:
        works = [dist.isend(chunk, self._to, self._group) for chunk in chunks_of(buffer)]
        self._sending.append((works, buffer))
        self._traffic.sent_bytes[AXIS] += buffer.nbytes
        self.finish(but=IN_FLIGHT)

    def finish(self, but: int = 0) -> None:
        """Wait until all but so many have gone."""
        while len(self._sending) > but:
            works, _buffer = self._sending.popleft()
            await_works(works, self._traffic)


class StageLink:
    """Receives from the rank ``previous`` and sends to ``next``: global ranks, None at the ends.
    Messages go in the groups ``from_before`` and ``to_after``, with ``via_cpu`` through CPU memory.
    ``device``: where announcements lie. ``before_waiting`` is called before each wait for a
    receive.

    A message may be announced: whether it comes at all, its length and dtype go before it. So a
    stage that fails before it knows them can take it, or send none.
    """

    def __init__(
        self,
        previous: int | None,
        next: int | None,
        *,
        from_before: dist.ProcessGroup | None = None,
        to_after: dist.ProcessGroup | None = None,
        via_cpu: bool,
        device: torch.device = CPU,
        traffic: Traffic | None = None,
        before_waiting: Callable[[], None] = lambda: None,
    ):
        self._previous = previous
        self._from_before = from_before
        self.traffic = traffic or Traffic()
        self._sends = Sends(next, to_after, self.traffic)
        self._via_cpu = via_cpu
        self._device = device
        self._before_waiting = before_waiting
        self._prepared: torch.Tensor | None = None
        self._posted: deque[tuple[Works, torch.Tensor]] = deque()
        # The number that came with a patch, and the one it should be
        self._unchecked: deque[tuple[LateValue, int]] = deque()

    def open(self, token: torch.Tensor, *, to_next: bool) -> None:
        """Send a message that is no patch to the next rank, or receive that of the one before in
        place of ``token``.
        """
        if to_next:
            self._sends.start(token)
            self._sends.finish()
        else:
            await_works([dist.irecv(token, self._previous, self._from_before)], self.traffic)
        token[0].item()  # NCCL tells of a failure here

    def free_buffers(self) -> None:
        """Wait for the sends in flight, then free their memory. Call between runs, when the next
        stage has asked for all of them. Raises as ``check``.
        """
        self._prepared = None
        self._sends.finish()
        self.check()

    def expect(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Post the receive of the next patch for which none is posted: ``count`` elements, the
        number of its request included. It must not be announced.
        """
        buffer, self._prepared = self._prepared, None
        if buffer is None or (buffer.numel(), buffer.dtype) != (count, dtype):
            buffer = torch.empty(count, dtype=dtype, device="cpu" if self._via_cpu else device)
        works = [dist.irecv(chunk, self._previous, self._from_before) for chunk in chunks_of(buffer)]
        self._posted.append((works, buffer))
        self.traffic.posted = len(self._posted)

    def prepare(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the next patch: nothing else of a receive can fail for want of memory."""
        if not self._posted:
            self._prepared = torch.empty(count, dtype=dtype, device="cpu" if self._via_cpu else device)

    def receive(
        self, number: int, count: int, dtype: torch.dtype, device: torch.device, *, is_announced: bool = False
    ) -> torch.Tensor | None:
        """Return the next patch (count,), where messages lie; of an announced one the announced
        size, None if none comes. Raises RuntimeError if the patch belongs to another request; on
        CUDA, if one up to ``CHECKED_LATER`` before it did.
        """
        with self.traffic.message(AXIS):
            if is_announced:
                is_nothing, announced, place = self._announcement().tolist()
                if is_nothing:
                    return None
                if announced:  # else nothing came: there is no stage before, as in a dry run
                    count, dtype = announced - 1, DTYPES[place]
            buffer = self._take(count, dtype, device)
        if buffer.numel() != count + 1:
            raise RuntimeError(OUT_OF_STEP)
        self._unchecked.append((LateValue(buffer[-1:]), number % NUMBERS))
        self.check(CHECKED_LATER if buffer.device.type == "cuda" else 0)
        return buffer[:-1]

    def discard(
        self, known: tuple[int, torch.dtype] | None, device: torch.device
    ) -> tuple[int, torch.dtype] | None:
        """Take the next patch for no use. ``known``: its elements and their dtype; None if it is
        announced. Return those of the patch that came, None if none did.
        """
        with self.traffic.message(AXIS):
            if known is None:
                is_nothing, announced, place = self._announcement().tolist()
                if is_nothing:
                    return None
                known = announced - 1, DTYPES[place]
            self._take(*known, device)
        return known

    def _take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not self._posted:
            self.expect(count + 1, dtype, device)
        works, buffer = self._posted.popleft()
        self.traffic.posted = len(self._posted)
        self._wait(works)
        return buffer

    def _announcement(self) -> torch.Tensor:
        """Return (whether nothing follows, elements of the message with the number of its request,
        place of their dtype in ``DTYPES``).
        """
        announced = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._wait([dist.irecv(announced, self._previous, self._from_before)])
        return announced

    def _wait(self, works: Works) -> None:
        self._before_waiting()
        await_works(works, self.traffic)

    def check(self, but: int = 0) -> None:
        """Raises RuntimeError if a received patch belongs to another request; the last ``but`` are
        left for later.
        """
        while len(self._unchecked) > but:
            came, due = self._unchecked.popleft()
            if came.read() != due:
                self._unchecked.clear()
                raise RuntimeError(OUT_OF_STEP)

    def send(self, number: int, hidden: torch.Tensor, *, is_announced: bool = False) -> None:
        """Start to send a copy of ``hidden`` (count,)."""
        buffer = torch.empty(
            hidden.numel() + 1, dtype=hidden.dtype, device="cpu" if self._via_cpu else hidden.device
        )
        buffer[:-1].copy_(hidden)
        buffer[-1:].fill_(number % NUMBERS)  # an assignment would copy the number from the CPU, and wait
        with self.traffic.message(AXIS):
            if is_announced:
                self._sends.start(announcement(self._device, 0, buffer.numel(), DTYPES.index(hidden.dtype)))
            self._sends.start(buffer)

    def announce_nothing(self) -> None:
        with self.traffic.message(AXIS):
            self._sends.start(announcement(self._device, 1, 0, 0))


def announcement(device: torch.device, *content: int) -> torch.Tensor:
    return torch.tensor(content, dtype=torch.int64, device=device)


def await_works(works: Works, traffic: Traffic) -> None:
    began = time.perf_counter()
    for work in works:
        assert work is not None
        work.wait()
    traffic.waited_s[AXIS] += time.perf_counter() - began


def chunks_of(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return buffer.split(max(1, CHUNK_BYTES // buffer.element_size()))
