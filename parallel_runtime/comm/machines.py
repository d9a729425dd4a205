"""Bring inputs to every machine before its ranks begin. Rank 0's machine has them already; the
first rank of every other machine receives them by broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class MachineComm:
    """The groups of ranks that bring inputs from machine to machine. Every rank must make one,
    after init_process_group, and before any other group.

    ``machines``: a number for each rank's machine; that of rank 0 is ComfyUI's own. Broadcasts go
    through CPU memory whatever the ranks compute on, because the inputs lie in the arena.
    """

    def __init__(self, machines: Sequence[int], rank: int):
        members = {
            machine: [other for other, place in enumerate(machines) if place == machine]
            for machine in dict.fromkeys(machines)
        }
        self.away = machines[rank] != machines[0]
        self._rank = rank
        self._is_first = members[machines[rank]][0] == rank
        # Every rank makes one, also where it is alone: see gloo_group
        beside = gloo_group(members[machines[rank]])
        self._beside = beside if self.away else None
        self._firsts = gloo_group([ranks[0] for ranks in members.values()]) if self._is_first else None

    def spread(self, pieces: Sequence[torch.Tensor]) -> None:
        """Fills ``pieces``, places of this machine's arena as bytes, with what rank 0 has in the
        same places. Every rank must call it.
        """
        sizes = [piece.numel() for piece in pieces]
        if self._is_first and sizes:
            parcel = (
                torch.cat(list(pieces)) if self._rank == 0 else torch.empty(sum(sizes), dtype=torch.uint8)
            )
            dist.broadcast(parcel, src=0, group=self._firsts)
            for piece, content in zip(pieces, parcel.split(sizes), strict=True):
                if self.away:
                    piece.copy_(content)
        if self._beside is not None:
            dist.barrier(self._beside)


def gloo_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """Make a group of these ranks, over gloo. They alone must call it: in a world that is bound to
    GPUs, torch has every other rank split NCCL's communicator, for which NCCL waits until all do.

    The members meet under a name that torch makes of their numbers and of how many groups each of
    them has: it must be as many.
    """
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return group if isinstance(group, dist.ProcessGroup) else None
