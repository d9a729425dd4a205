"""Read weights once on a machine: of the ranks that hold the same ones each reads an equal part,
and all gather the rest from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from .device_copies import Reached
from .mesh import Mesh
from .traffic import Stopped

LEAST_BYTES = 1 << 16  # of a tensor that is read in parts: a message costs more than to read less


class Readers:
    """The ``size`` ranks of ``group`` (None: all), of which this is ``rank``."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int):
        self._group = group
        self._rank = rank
        self._size = size

    def read(
        self, weights: Iterable[tuple[torch.Tensor, torch.Tensor]], on_progress: Callable[[int], None]
    ) -> None:
        """Fill each place, on a device, with its source; neither may have gaps. ``on_progress`` is
        told the bytes of each. All ranks must call it, for the same weights in the same order.

        A rank that fails gathers on, so that nobody waits for it. In the end it raises its error,
        and the others raise Stopped.
        """
        failure: Exception | None = None
        gathering: dist.Work | None = None
        device = torch.device("cpu")
        for place, source in weights:
            device, whole, content = place.device, place.view(-1), source.detach().view(-1)
            each = whole.numel() // self._size
            mine, rest = slice(self._rank * each, (self._rank + 1) * each), slice(self._size * each, None)
            try:
                for part in () if failure is not None else (mine, rest):
                    whole[part].copy_(content[part])
            except Exception as error:  # noqa: BLE001 it is raised when all have gathered
                failure = error
            before, gathering = gathering, self._gather(whole[: rest.start], whole[mine])
            finish(before, device)  # so none is far ahead, and waits long for the others
            on_progress(place.nbytes)
        finish(gathering, device)
        own = torch.tensor([failure is not None], dtype=torch.uint8, device=device)
        told = own.new_zeros(self._size)
        finish(self._gather(told, own), device)
        if failure is not None:
            raise failure
        if told.any().item():
            raise Stopped

    def _gather(self, whole: torch.Tensor, part: torch.Tensor) -> dist.Work | None:
        as_bytes = whole.view(torch.uint8), part.view(torch.uint8)  # not every backend knows every dtype
        return dist.all_gather_into_tensor(*as_bytes, group=self._group, async_op=True)


def finish(gathering: dist.Work | None, device: torch.device) -> None:
    if gathering is not None:
        gathering.wait()
        Reached(device).wait()


def readers_of(mesh: Mesh) -> Readers | None:
    """Return the ranks that read weights together with this one: those on GPUs that have a
    communicator and hold the same blocks. None if each reads for itself: on CPUs all compute on the
    file's own pages, and a message over gloo is slower than reading these.
    """
    layout, sequence = mesh.layout, mesh.sequence
    if sequence.device.type != "cuda" or layout.world_size // layout.stages == 1:
        return None
    if layout.groups == 1:
        return Readers(sequence.world.group, sequence.world.rank, sequence.world.size)
    return Readers(None, mesh.rank, layout.world_size) if layout.stages == 1 else None
