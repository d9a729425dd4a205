"""What every host must have before its ranks begin: rank 0's host has it already, the leader of
every other receives it by broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class MachineComm:
    """Every rank must make it, after init_process_group. ``hosts``: a number for each rank's host,
    that of rank 0 is ComfyUI's own.

    Through host memory whatever the ranks compute on: what is broadcast lies in the arena.
    """

    def __init__(self, hosts: Sequence[int], rank: int):
        members = {host: [other for other, place in enumerate(hosts) if place == host] for host in dict.fromkeys(hosts)}
        self.away = hosts[rank] != hosts[0]
        self._rank = rank
        self._leads = members[hosts[rank]][0] == rank
        self._leaders = dist.new_group([ranks[0] for ranks in members.values()], backend="gloo")
        groups = {host: dist.new_group(ranks, backend="gloo") for host, ranks in members.items() if host != hosts[0] and len(ranks) > 1}
        self._beside = groups.get(hosts[rank])

    def spread(self, pieces: Sequence[torch.Tensor]) -> None:
        """Every rank must call it, with the same places of its own host's arena, as bytes. Returns
        when they are filled on this host.
        """
        sizes = [piece.numel() for piece in pieces]
        if self._leads and sizes:
            parcel = torch.cat(list(pieces)) if self._rank == 0 else torch.empty(sum(sizes), dtype=torch.uint8)
            dist.broadcast(parcel, src=0, group=self._leaders)
            for piece, content in zip(pieces, parcel.split(sizes), strict=True):
                if self.away:
                    piece.copy_(content)
        if self._beside is not None:
            dist.barrier(self._beside)
