"""The one collective sequence parallelism needs: an uneven all-to-all of tensors, with a flag riding along.

Each rank's wish to stop travels as one extra element behind every chunk, so that all ranks of the group learn of it at the same
exchange and leave at the same block. On CUDA the flag is read ``LOOK_AHEAD`` exchanges later: the host does not wait for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

LOOK_AHEAD = 8

Shape = tuple[int, ...]


class Stopped(BaseException):
    """Every rank of the group has agreed to leave the forward here. Not an Exception: host code catches those around attention."""


def numel(shape: Shape) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


class Exchange:
    """All ranks of ``group`` must make the same calls in the same order. ``wants_stop`` is asked before each exchange."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, *, on_host: bool, wants_stop: Callable[[], bool]):
        self.rank = rank
        self.size = size
        self._group = group
        self._on_host = on_host
        self._wants_stop = wants_stop
        self._flags: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._buffers: dict[tuple, torch.Tensor] = {}
        self.seconds = 0.0
        self.sent_bytes = 0

    def begin(self) -> None:
        """A new evaluation: counters at zero, no flag outstanding."""
        self.seconds, self.sent_bytes = 0.0, 0
        self._flags.clear()

    def stop_point(self) -> None:
        """Where one rank alone makes the group, this takes the exchange's place."""
        if self._wants_stop():
            raise Stopped

    def all_to_all(self, chunks: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """``chunks[j]`` are the tensors for rank j, sent one after another; returns what rank i sent, in ``shapes[i]``.

        The own chunk is not moved: its place in the result is empty. Results are views of a buffer that the next exchange reuses.
        """
        first = next(tensor for chunk in chunks for tensor in chunk)
        device = torch.device("cpu") if self._on_host else first.device
        others = [rank for rank in range(self.size) if rank != self.rank]
        send_sizes = [sum(t.numel() for t in chunks[rank]) + 1 if rank != self.rank else 0 for rank in range(self.size)]
        receive_sizes = [numel(shapes[rank]) + 1 if rank != self.rank else 0 for rank in range(self.size)]
        sending = self._buffer("send", sum(send_sizes), first.dtype, device)
        receiving = self._buffer("receive", sum(receive_sizes), first.dtype, device)
        flag = float(self._wants_stop())

        offset = 0
        for rank in others:
            for tensor in chunks[rank]:
                sending[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
                offset += tensor.numel()
            sending[offset] = flag
            offset += 1

        began = time.perf_counter()
        self._move(receiving, sending, receive_sizes, send_sizes)
        self.seconds += time.perf_counter() - began
        self.sent_bytes += sum(send_sizes) * sending.element_size()

        received, flags, offset = [receiving[:0]] * self.size, [], 0
        for rank in others:
            count = receive_sizes[rank] - 1
            received[rank] = receiving[offset : offset + count].view(shapes[rank])
            flags.append(receiving[offset + count])
            offset += count + 1
        self._agree(flag, torch.stack(flags))
        return received

    def _move(self, receiving: torch.Tensor, sending: torch.Tensor, receive_sizes: Sequence[int], send_sizes: Sequence[int]) -> None:
        if dist.get_backend(self._group) != "gloo":
            dist.all_to_all_single(receiving, sending, receive_sizes, send_sizes, group=self._group)
            return
        # gloo runs a collective on a thread of its own and a plain send on the caller's: two switches of threads fewer at every exchange.
        works, pieces = [], zip(receiving.split(receive_sizes), sending.split(send_sizes), strict=True)
        for rank, (incoming, outgoing) in enumerate(pieces):
            if rank != self.rank:
                peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
                works += [dist.irecv(incoming, peer, self._group), dist.isend(outgoing, peer, self._group)]
        for work in works:
            work.wait()

    def _buffer(self, use: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (use, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count:
            self._buffers[key] = torch.empty(count, dtype=dtype, device=device, pin_memory=self._on_host and torch.cuda.is_available())
        return self._buffers[key][:count]

    def _agree(self, own: float, others: torch.Tensor) -> None:
        """Every rank sees the same set of flags for the same exchange, its own included, and so decides alike."""
        if others.device.type != "cuda":
            if own or bool(others.any()):
                raise Stopped
            return
        flags = torch.empty(others.numel() + 1, dtype=others.dtype, pin_memory=True)
        flags[-1] = own
        flags[:-1].copy_(others, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flags.append((event, flags))
        if len(self._flags) > LOOK_AHEAD:
            event, flags = self._flags.popleft()
            event.synchronize()
            if bool(flags.any()):
                raise Stopped
