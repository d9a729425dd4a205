"""What passes from one stage of a pipeline to the next: the hidden rows of every patch, in the
order in which patches were submitted.

Every stage receives once and sends once for every patch, whatever happens to it in between, so both
ends always agree on what comes next. There is no circle: the last stage hands its output to the UI.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

CHUNK_BYTES = 32 << 20  # transports stall above 64 MiB
IN_FLIGHT = 4  # sends whose memory is kept


class StageLink:
    """``previous`` and ``next``: global ranks, or None at the ends. ``via_cpu``: messages go
    through host memory.
    """

    def __init__(self, previous: int | None, next: int | None, *, via_cpu: bool, before_waiting: Callable[[], None] = lambda: None):
        self._previous = previous
        self._next = next
        self._on_host = via_cpu
        self._before_waiting = before_waiting
        self._posted: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        self._sending: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        self.seconds = 0.0
        self.sent_bytes = 0

    def begin(self) -> None:
        self.seconds, self.sent_bytes = 0.0, 0

    def expect(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Posts the receive of the next patch but those posted before: ``count`` elements, the
        number of its request included.
        """
        buffer = torch.empty(count, dtype=dtype, device="cpu" if self._on_host else device)
        works = [dist.irecv(chunk, self._previous) for chunk in chunks_of(buffer)]
        self._posted.append((works, buffer))

    def receive(self, number: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next patch, (count,). Raises RuntimeError if it is another request's: the stages are
        out of step.
        """
        if not self._posted:
            self.expect(count + 1, dtype, device)
        works, buffer = self._posted.popleft()
        self._before_waiting()
        began = time.perf_counter()
        for work in works:
            work.wait()
        self.seconds += time.perf_counter() - began
        if buffer.numel() != count + 1 or (buffer.device.type == "cpu" and int(buffer[-1]) != number % 128):
            raise RuntimeError("the stages of the pipeline are out of step")
        return buffer[:-1].to(device)

    def send(self, number: int, hidden: torch.Tensor) -> None:
        """Starts sending (count,); the memory is looked after."""
        buffer = torch.empty(hidden.numel() + 1, dtype=hidden.dtype, device="cpu" if self._on_host else hidden.device)
        buffer[:-1].copy_(hidden)
        buffer[-1] = number % 128
        self._sending.append(([dist.isend(chunk, self._next) for chunk in chunks_of(buffer)], buffer))
        self.sent_bytes += buffer.numel() * buffer.element_size()
        while len(self._sending) > IN_FLIGHT:
            began = time.perf_counter()
            for work in self._sending.popleft()[0]:
                work.wait()
            self.seconds += time.perf_counter() - began


def chunks_of(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return buffer.split(max(1, CHUNK_BYTES // buffer.element_size()))
