"""The ranks that share one sequence: a grid of ulysses x ring, and the groups along its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .exchange import Exchange, StopFlag
from .ring import Ring


class SequenceComm:
    """``ulysses`` and ``ring`` are the groups through this rank, ``world`` all ranks of the
    sequence.
    """

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


def connect(
    mesh: Sequence[Sequence[Sequence[int]]], rank: int, *, device_type: str, via_cpu: bool, wants_stop: Callable[[], bool]
) -> SequenceComm:
    """Every rank must call it, after init_process_group where there are several. ``mesh``: the
    layout's; a sequence is shared within a stage, around a ring only where there is one stage.
    """
    ring, ulysses = len(mesh[0]), len(mesh[0][0])
    size = ring * ulysses
    stop = StopFlag(wants_stop)
    if size == 1:
        return SequenceComm(
            Exchange(None, 0, 1, via_cpu=via_cpu), Ring(None, [0], 0, via_cpu=via_cpu), Exchange(None, 0, 1, via_cpu=via_cpu), stop
        )
    devices = DeviceMesh(device_type, mesh, mesh_dim_names=("pipefusion", "ring", "ulysses"))
    stage, ring_index, ulysses_index = devices.get_coordinate()
    world = devices.get_group("ulysses") if len(mesh) > 1 else dist.group.WORLD
    return SequenceComm(
        Exchange(devices.get_group("ulysses"), ulysses_index, ulysses, via_cpu=via_cpu),
        Ring(devices.get_group("ring"), [row[ulysses_index] for row in mesh[stage]], ring_index, via_cpu=via_cpu),
        Exchange(world, ring_index * ulysses + ulysses_index, size, via_cpu=via_cpu),
        stop,
    )
