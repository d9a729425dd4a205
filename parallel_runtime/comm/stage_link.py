"""Send the hidden rows of patches from one stage of a pipeline to the next, in the order in which
patches were submitted.

A stage receives once and sends once for every patch, even for one that fails there, so both ends
always agree on what comes next. No stage can wait for itself: the last one sends to none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .late import LateValue

CHUNK_BYTES = 32 << 20  # transports stall above 64 MiB
IN_FLIGHT = 4  # sends whose memory is kept
CHECKED_LATER = 2  # patches, on CUDA: the CPU does not wait for a patch to know whose it is
NUMBERS = 128  # each is exact in every dtype that hidden rows have
OUT_OF_STEP = "the stages of the pipeline are out of step"

Works = Sequence["dist.Work | None"]  # torch's type: None where this rank is not of the group


class StageLink:
    """Receives from the rank ``previous`` and sends to ``next``: global ranks, None at the ends.

    ``via_cpu``: messages go through CPU memory. ``before_waiting`` is called before each wait for
    a receive.
    """

    def __init__(self, previous: int | None, next: int | None, *, via_cpu: bool, before_waiting: Callable[[], None] = lambda: None):
        self._previous = previous
        self._next = next
        self._via_cpu = via_cpu
        self._before_waiting = before_waiting
        self._posted: deque[tuple[Works, torch.Tensor]] = deque()
        self._sending: deque[tuple[Works, torch.Tensor]] = deque()
        self._unchecked: deque[tuple[LateValue, int]] = deque()  # the number that came with a patch, and the one it should be
        self.seconds = 0.0
        self.sent_bytes = 0

    def begin(self) -> None:
        """Begin a patch: set the counters to zero."""
        self.seconds, self.sent_bytes = 0.0, 0

    def free_buffers(self) -> None:
        """Wait for the sends in flight, then free their memory. Call between runs, when the next
        stage has asked for all of them. Raises as ``check``.
        """
        while self._sending:
            self._finish_oldest_send()
        self.check()

    def expect(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Post the receive of the next patch for which none is posted: ``count`` elements, the
        number of its request included.
        """
        buffer = torch.empty(count, dtype=dtype, device="cpu" if self._via_cpu else device)
        works = [dist.irecv(chunk, self._previous) for chunk in chunks_of(buffer)]
        self._posted.append((works, buffer))

    def receive(self, number: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the next patch, (count,). Raises RuntimeError if it belongs to another request; on
        CUDA, if one of ``CHECKED_LATER`` before it did.
        """
        if not self._posted:
            self.expect(count + 1, dtype, device)
        works, buffer = self._posted.popleft()
        self._before_waiting()
        began = time.perf_counter()
        wait_for(works)
        self.seconds += time.perf_counter() - began
        if buffer.numel() != count + 1:
            raise RuntimeError(OUT_OF_STEP)
        self._unchecked.append((LateValue(buffer[-1:]), number % NUMBERS))
        self.check(CHECKED_LATER if self._unchecked[-1][0].costs_a_wait else 0)
        return buffer[:-1].to(device)

    def check(self, but: int = 0) -> None:
        """Raise RuntimeError if a patch that was received belongs to another request; ``but`` so
        many of the last are left for later.
        """
        while len(self._unchecked) > but:
            came, due = self._unchecked.popleft()
            if came.read() != due:
                self._unchecked.clear()
                raise RuntimeError(OUT_OF_STEP)

    def send(self, number: int, hidden: torch.Tensor) -> None:
        """Start to send (count,), a copy of which is kept until it has gone."""
        buffer = torch.empty(hidden.numel() + 1, dtype=hidden.dtype, device="cpu" if self._via_cpu else hidden.device)
        buffer[:-1].copy_(hidden)
        buffer[-1:].fill_(number % NUMBERS)  # an assignment would copy the number from the CPU, and wait
        self._sending.append(([dist.isend(chunk, self._next) for chunk in chunks_of(buffer)], buffer))
        self.sent_bytes += buffer.numel() * buffer.element_size()
        while len(self._sending) > IN_FLIGHT:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        works, _buffer = self._sending.popleft()
        began = time.perf_counter()
        wait_for(works)
        self.seconds += time.perf_counter() - began


def wait_for(works: Works) -> None:
    for work in works:
        assert work is not None
        work.wait()


def chunks_of(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return buffer.split(max(1, CHUNK_BYTES // buffer.element_size()))
