"""Gather bytes of which each rank of a sequence holds an equal part, while the ranks compute
(all-gather prefetch). The messages have a group of their own, so that NCCL gives them a stream of
their own, and messages of attention need not wait for them.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .traffic import Mover


class ShardGather(Mover):
    """Gathers among the ranks of ``group``, all of which must start the same gathers in the same
    order. ``rank`` is within the group. With ``via_cpu`` the parts have to lie in CPU memory.
    ``width``: how many neighbouring groups compute the evaluation together.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, *, via_cpu: bool):
        super().__init__("weights", size, via_cpu=via_cpu)
        self.rank = rank
        self._group = group
        self.width = 1
        self._works: list[dist.Work] = []

    def open(self, token: torch.Tensor) -> torch.Tensor:
        """Gather ``token`` (1,) of each rank by the operation that messages use."""
        came = token.new_zeros(self.size)
        self.start(token, came)
        self.wait()
        return came

    def start(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Start to gather every rank's ``part`` (n,) into ``whole`` (size * n,), in rank order.
        Both must stay as they are until ``wait``.
        """
        self.wait()
        with self.traffic.message(self.axis):
            self._send(part, whole)

    def _send(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        self.traffic.sent_bytes[self.axis] += (self.size - 1) * part.nbytes
        if self.size > 1 and dist.get_backend(self._group) != "gloo":
            work = dist.all_gather_into_tensor(whole, part, group=self._group, async_op=True)
            self._works = [work] if work is not None else []
            return
        for rank, place in enumerate(whole.split(part.numel())):
            if rank == self.rank:
                place.copy_(part)
            else:
                peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
                self._works += [dist.irecv(place, peer, self._group), dist.isend(part, peer, self._group)]  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self) -> None:
        """Wait for the gather that was started last, if any."""
        began = time.perf_counter()
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self.traffic.waited_s[self.axis] += time.perf_counter() - began
