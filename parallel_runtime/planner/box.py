"""Devices and the links between them: all that a prediction knows of a machine.

Ranks are numbered so that neighbours are near each other. A *level* is a group of neighbours that
share one way to all other ranks: of one rank, its own port; of those on one CPU socket, the link to
the other socket; of those on one machine, its network. Every message between two groups takes from
the way out of the one and the way into the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

# Rows, and columns, of a product's result that a processor computes at once: "waves" in
# published.json
TILE = 128


class Cache(NamedTuple):
    """A device's cache. Kernels whose inputs and outputs all fit in ``nbytes`` move them at
    ``bytes_per_s`` instead of at the speed of the device's memory.
    """

    nbytes: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceSpeeds:
    """Speeds as achieved on a model's blocks, not peaks. ``launch_s``: the CPU's time to start a
    kernel while the device computes. ``beside_s``: a block's time beside its computation, if
    nothing is started ahead. ``merge_bytes_per_s``: the speed of the additional work for a ring's
    parts of an attention; 0 for the memory's speed. ``processors``: that take a tile of a product
    each; 0 where there are none, or speeds were measured. ``cache``: None where they were measured,
    with what is moved between products.
    """

    name: str
    matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float = 0.0
    beside_s: float = 0.0
    merge_bytes_per_s: float = 0.0
    processors: int = 0
    cache: Cache | None = None

    def busy(self, tiles: float, idle: float = 0.5) -> float:
        """Return the part of a kernel's time in which processors have a tile. Processors take tiles
        in waves, and a part of the last wave is ``idle``, on average half: with 100 processors and
        150 tiles 150 / (150 + 50) = 0.75.
        """
        return tiles / (tiles + idle * self.processors) if tiles else 1.0

    def moving_s(self, nbytes: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes, and computes
        little.
        """
        if self.cache is None:
            return 0.0
        return nbytes / (self.cache.bytes_per_s if nbytes <= self.cache.nbytes else self.memory_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Level:
    """Groups of ``ranks`` neighbours, and the way from each to all others: ``bytes_per_s`` out and
    as many in, ``latency_s`` for each message.
    """

    ranks: int
    bytes_per_s: float
    latency_s: float


class LinkSpeed(NamedTuple):
    """What each rank sends while all groups of so many neighbours exchange all with all."""

    bytes_per_s: float
    latency_s: float


Links = Mapping[int, LinkSpeed]  # by the ranks of a group: neighbours, each group of whole smaller ones


def measured_levels(links: Links) -> list[Level]:
    """Return the levels at which exchanges take as long as was measured.

    In an exchange of ``ranks`` a subgroup of ``inner`` sends inner * (ranks - inner) times as much
    to the others as a rank sends to one. A larger group gets a level of its own if it takes longer
    than the levels within it say: of 4 ranks that send 3 GB/s each, and 9 in pairs, a pair sends
    2 * 2 / 3 * 3 = 4 GB/s to the other pair.
    """
    levels: list[Level] = []
    inner = 1
    for ranks, (bytes_per_s, latency_s) in sorted(links.items()):
        each_s = (ranks - 1) / bytes_per_s
        within_s = max((one.ranks * (ranks - one.ranks) / one.bytes_per_s for one in levels), default=0.0)
        if each_s > within_s:
            way = inner * (ranks - inner) / each_s
            levels.append(Level(ranks=inner, bytes_per_s=way, latency_s=latency_s))
        inner = ranks
    return levels


class SentBytes(NamedTuple):
    source: int
    target: int
    nbytes: float


@dataclass(frozen=True, kw_only=True)
class Box:
    """A machine, or several. ``levels`` from the innermost outwards. ``host_bytes_per_s``: from
    main memory to each device. ``hop_s``: from the sampler to the pool and back, in one evaluation.
    ``overlaps``: messages travel while ranks compute, because no core of the ranks moves them.
    ``exchanges``: so many ranks, and the least that an exchange of all with all takes them.
    ``patch_s``: of ComfyUI's process for each patch of a pipeline. ``machine``: devices of each
    machine, ComfyUI being on the first; 0 where there is one.
    """

    name: str
    devices: tuple[DeviceSpeeds, ...]
    levels: tuple[Level, ...]
    host_bytes_per_s: float
    hop_s: float
    overlaps: bool = True
    exchanges: tuple[tuple[int, float], ...] = ()
    patch_s: float = 0.0
    machine: int = 0

    def spans(self, ranks: Iterable[int]) -> bool:
        """Return whether ranks are on several machines."""
        return self.machine > 0 and len({rank // self.machine for rank in ranks}) > 1

    def first(self, ranks: int) -> Box:
        """Return the box with its first devices alone."""
        return replace(self, devices=self.devices[:ranks])

    def exchange_s(self, ranks: int) -> float:
        """Return the least that an exchange of so many ranks takes: between numbers that are known
        in proportion, and beyond them as the last one.
        """
        few, less_s = 2, 0.0
        for more, more_s in self.exchanges:
            if ranks <= more:
                return less_s + (more_s - less_s) * max(0, ranks - few) / (more - few)
            few, less_s = more, more_s
        return less_s

    def seconds(self, messages: Iterable[SentBytes], least_s: float = 0.0) -> float:
        """Return how long it takes until all of ``messages``, sent at once, have arrived: the
        fullest way decides. ``least_s``: their latency where that is more than the ways'.
        """
        used: dict[tuple[int, int, str], float] = {}
        slowest = least_s
        for message in messages:
            if not message.nbytes or message.source == message.target:
                continue
            for index, level in enumerate(self.levels):
                outwards, inwards = message.source // level.ranks, message.target // level.ranks
                if outwards == inwards:
                    break
                slowest = max(slowest, level.latency_s)
                for way in ((index, outwards, "out"), (index, inwards, "in")):
                    used[way] = used.get(way, 0.0) + message.nbytes
        return slowest + max(
            (nbytes / self.levels[way[0]].bytes_per_s for way, nbytes in used.items()), default=0.0
        )
