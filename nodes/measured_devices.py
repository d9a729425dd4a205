"""What ranks have measured of this machine's GPUs, and the file that keeps it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path

import torch

from ..launcher.cache import cache_folder
from ..parallel_runtime.comm.cores import bus_of
from ..parallel_runtime.planner.box import Links
from ..parallel_runtime.planner.machine import NO_LINKS
from ..parallel_runtime.planner.measurements import (
    DEVICES,
    keep_devices,
    keep_links,
    link_versions,
    read_devices,
    read_links,
    slowest_links,
)
from ..pool.devices import Device, Placement
from ..pool.pool import WorkerPool

log = logging.getLogger("pipemesh")


class MeasuredDevices:
    """The speeds of GPUs that ranks measured under this torch before this ComfyUI started, as
    another speed would be another pool; and how fast GPUs exchange, measured by now too.
    """

    def __init__(self, file: Path | None = None):
        self._file = file or cache_folder(os.environ) / DEVICES
        self._speeds = read_devices(self._file)
        self._links = read_links(self._file, link_versions())

    def with_speeds(self, gpus: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the GPUs with their speeds; a GPU that was never measured gets 0."""
        return tuple(replace(gpu, flops_per_s=self._speeds.get(gpu.title, 0.0)) for gpu in gpus)

    def links_of(self, placement: Placement) -> Links:
        """Return how fast ranks on these GPUs exchange, in groups of so many neighbours as are
        known: of 4 GPUs of which the first two have exchanged, in pairs.
        """
        wanted, best = addresses_of(placement), NO_LINKS
        for addresses, links in self._links.items():
            alike = len(commonprefix([wanted, addresses.split(",")]))
            known = {ranks: speed for ranks, speed in links.items() if ranks <= alike}
            best = max(best, known, key=lambda one: max(one, default=0))
        return best

    def lacks_links(self, placement: Placement) -> bool:
        """Return whether the ranks of a pool are to time how fast they exchange."""
        addresses = addresses_of(placement)
        known = self._links.get(",".join(addresses), NO_LINKS)
        return bool(addresses) and max(known, default=1) < exchanging(placement)

    def keep(self, pool: WorkerPool) -> None:
        """Store what the ranks of a pool that has just started have measured."""
        found = {one.device_name: one.flops_per_s for one in pool.ready if one.flops_per_s}
        links = slowest_links([one.links for one in pool.ready])
        try:
            keep_devices(self._file, found)
            if links:
                addresses = ",".join(addresses_of(pool.placement))
                self._links[addresses] = links
                keep_links(self._file, link_versions(), addresses, links)
        except OSError as error:
            log.warning(
                "[PipeMesh] The measured speeds of the GPUs could not be saved (%s): PipeMesh uses"
                " published figures.",
                error,
            )
        for ranks, speed in links.items():
            log.info("[PipeMesh] %d GPUs exchange %.1f GB/s, measured", ranks, speed.bytes_per_s / 1e9)


def exchanging(placement: Placement) -> int:
    """Return how many ranks exchange all with all in the pool, at most."""
    layout = placement.layout
    return layout.joined(layout.widths[-1]).sequence_size


def addresses_of(placement: Placement) -> list[str]:
    """Return the addresses of the ranks' GPUs; [] if ranks do not exchange over NCCL on GPUs of
    their own in this machine, or the system does not tell an address.
    """
    if placement.backend != "nccl" or placement.other_machines:
        return []
    found = [bus_of(torch.cuda.get_device_properties(one.local_name)) for one in placement.devices]
    return found if all(found) else []
