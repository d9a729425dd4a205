"""The ranks that share one sequence: a grid of ulysses x ring, and the groups along its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .exchange import Exchange, StopFlag
from .ring import Ring


class SequenceComm:
    """``ulysses`` and ``ring`` are the groups through this rank, ``world`` all ranks of the sequence."""

    def __init__(self, ulysses: Exchange, ring: Ring, world: Exchange, stop: StopFlag):
        self.ulysses = ulysses
        self.ring = ring
        self.world = world
        self.stop = stop

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def seconds(self) -> float:
        """Spent waiting for messages since ``begin``."""
        return self.ulysses.seconds + self.ring.seconds + self.world.seconds

    @property
    def sent_bytes(self) -> int:
        return self.ulysses.sent_bytes + self.ring.sent_bytes + self.world.sent_bytes

    def begin(self) -> None:
        for part in (self.ulysses, self.ring, self.world, self.stop):
            part.begin()


def connect(degrees: Sequence[int], rank: int, *, device_type: str, on_host: bool, wants_stop: Callable[[], bool]) -> SequenceComm:
    """Every rank must call it, after init_process_group where there are several. ``degrees``: of stages, ring and ulysses; a sequence is
    shared within a stage, by a ring only where there is one stage."""
    stages, ring, ulysses = degrees
    size = ulysses * ring
    stop = StopFlag(wants_stop)
    if size == 1:
        return SequenceComm(
            Exchange(None, 0, 1, on_host=on_host), Ring(None, [0], 0, on_host=on_host), Exchange(None, 0, 1, on_host=on_host), stop
        )
    mesh = init_device_mesh(device_type, tuple(degrees), mesh_dim_names=("pipefusion", "ring", "ulysses"))
    _stage, ring_index, ulysses_index = mesh.get_coordinate()
    world = mesh.get_group("ulysses") if stages > 1 else dist.group.WORLD
    return SequenceComm(
        Exchange(mesh.get_group("ulysses"), ulysses_index, ulysses, on_host=on_host),
        Ring(mesh.get_group("ring"), dist.get_process_group_ranks(mesh.get_group("ring")), ring_index, on_host=on_host),
        Exchange(world, rank % size, size, on_host=on_host),
        stop,
    )
