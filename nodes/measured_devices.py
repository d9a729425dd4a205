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
from ..parallel_runtime.planner.box import Links, LinkSpeed
from ..parallel_runtime.planner.machine import NO_LINKS
from ..parallel_runtime.planner.measurements import (
    DEVICES,
    fastest_links,
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
        self._versions = link_versions()
        self._links = read_links(self._file, self._versions)

    def with_speeds(self, gpus: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the GPUs with their speeds; a GPU that was never measured gets 0."""
        return tuple(replace(gpu, flops_per_s=self._speeds.get(gpu.title, 0.0)) for gpu in gpus)

    def links_of(self, placement: Placement) -> Links:
        """Return how fast ranks on these GPUs exchange, in groups of so many neighbours as are
        known: of 4 GPUs of which the first two have exchanged, in pairs.
        """
        wanted = addresses_of(placement)
        known: dict[int, LinkSpeed] = {}
        for addresses in sorted(list(self._links), key=len, reverse=True):  # fewer GPUs tell it exactly
            alike = len(commonprefix([wanted, addresses.split(",")]))
            links = self._links[addresses].items()
            known.update({ranks: speed for ranks, speed in links if ranks <= alike})
        return known

    def keep(self, pool: WorkerPool) -> None:
        """Store what the ranks of a pool that has just started have measured."""
        found = {one.device_name: one.flops_per_s for one in pool.ready if one.flops_per_s}
        links = slowest_links([one.links for one in pool.ready])
        addresses = ",".join(addresses_of(pool.placement)) if links else ""
        if links:
            links = self._links[addresses] = fastest_links(self._links.get(addresses, NO_LINKS), links)
        try:
            keep_devices(self._file, found)
            if links:
                keep_links(self._file, self._versions, addresses, links)
        except OSError as error:
            log.warning(
                "[PipeMesh] The measured speeds of the GPUs could not be saved (%s): the next start of"
                " ComfyUI uses published figures.",
                error,
            )
        for ranks, speed in links.items():
            log.info("[PipeMesh] In groups of %d, GPUs exchange %.1f GB/s", ranks, speed.bytes_per_s / 1e9)


def times_links(placement: Placement) -> bool:
    """Return whether the ranks of a pool time how fast they exchange, each time they start: a GPU
    that was busy then, or a link that slept, is not believed for ever.
    """
    layout = placement.layout
    return layout.joined(layout.widths[-1]).sequence_size > 1 and bool(addresses_of(placement))


def addresses_of(placement: Placement) -> list[str]:
    """Return the addresses of the ranks' GPUs; [] if ranks do not exchange over NCCL on GPUs of
    their own in this machine, or the system does not tell an address.
    """
    if placement.backend != "nccl" or placement.other_machines:
        return []
    found = [bus_of(torch.cuda.get_device_properties(one.local_name)) for one in placement.devices]
    return found if all(found) else []
