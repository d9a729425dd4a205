"""Pass keys and values around a ring of ranks: the next block travels while the current one is
computed with.

Source: Ring Attention (arXiv 2310.01889). K and V travel as one message, with the origin's wish to
stop as one extra element.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Block:
    """One rank's keys and values, and where they come from."""

    source: int  # its index in the ring
    kv: torch.Tensor  # (2, B, h, K, D); a view of a buffer that is used again, valid until the next block
    flag: torch.Tensor  # (1,): not 0 if that rank wishes to stop


class Ring:
    """Passes blocks among the ranks of ``group``, all of which must walk the ring together.
    ``ranks`` are their global ranks in ring order.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], index: int, *, via_cpu: bool):
        self.index = index
        self.size = len(ranks)
        self._group = group
        self._next = ranks[(index + 1) % self.size]
        self._previous = ranks[(index - 1) % self.size]
        self._via_cpu = via_cpu
        self._buffers: dict[tuple, torch.Tensor] = {}
        self.seconds = 0.0
        self.sent_bytes = 0

    def begin(self) -> None:
        """Begin an evaluation: set the counters to zero."""
        self.seconds, self.sent_bytes = 0.0, 0

    def free_buffers(self) -> None:
        self._buffers.clear()

    def walk(self, kv: torch.Tensor, keys: Sequence[int], flag: torch.Tensor) -> Iterator[Block]:
        """Yield every rank's block, the own one first. Walk it to its end: others wait for what is
        passed on.

        ``kv`` (2, B, h, K, D); ``keys``: K of each rank of the ring; ``flag`` (1,): this rank's
        wish to stop.
        """
        shape = list(kv.shape)
        device = torch.device("cpu") if self._via_cpu else kv.device
        current = self._buffer(0, kv.numel() + 1, kv.dtype, device)
        current[:-1].copy_(kv.flatten())
        current[-1:].copy_(flag)
        source = self.index
        for step in range(self.size):
            arriving, works, coming = current, [], (source - 1) % self.size
            if step < self.size - 1:
                count = shape[0] * shape[1] * shape[2] * keys[coming] * shape[4]
                arriving = self._buffer(1 + step % 2, count + 1, kv.dtype, device)
                works = self._pass_on(current, arriving)
                self.sent_bytes += current.numel() * current.element_size()
            block = current[:-1].view(*shape[:3], keys[source], shape[4])
            yield Block(source, kv if step == 0 else block.to(kv.device), current[-1:].to(kv.device, copy=True))
            began = time.perf_counter()
            for work in works:
                work.wait()
            self.seconds += time.perf_counter() - began
            current, source = arriving, coming

    def _pass_on(self, current: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
        """Start a send and a receive; return them to be waited for."""
        operations = [
            dist.P2POp(dist.isend, current, self._next, self._group),
            dist.P2POp(dist.irecv, arriving, self._previous, self._group),
        ]
        return dist.batch_isend_irecv(operations)

    def _buffer(self, slot: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the first ``count`` elements of one of three buffers, used in turn: one is sent,
        one (the same, or the own block) computed with, and into one the next block arrives.
        """
        key = (slot, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count:
            self._buffers[key] = torch.empty(count, dtype=dtype, device=device, pin_memory=self._via_cpu and torch.cuda.is_available())
        return self._buffers[key][:count]
