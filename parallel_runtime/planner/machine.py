"""The box of a pool on this machine: published speeds of its GPUs, else plain figures of a CPU's
cores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from .box import Box, DeviceSpeeds, Level, Links, measured_levels
from .cost import MERGE_BYTES, UNFUSED_MERGE_BYTES
from .evaluation_count import ITEM_BYTES
from .published_boxes import GIGA, MICRO, TERA, box_of, device, figures, links, network_of, slowest_link

PLAIN_GPU = "RTX3090"  # for a GPU that no figures are published of here
# In names of GPUs that NVLink connects to all others of their machine
ALL_LINKED = re.compile(r"SXM|HBM3|H200|B200")
NOT_LINKED = re.compile(r"PCIe|NVL\b")  # of cards
FP32_BYTES = 4
NETWORK_GBITS = 10  # between machines: nothing measures it
NO_LINKS: Links = MappingProxyType({})
HowKnown = Literal["published", "plain"]


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank: its title as the driver has it, and its memory. ``cores`` of a rank on
    the CPU; 0 on a GPU. ``flops_per_s`` of matrix products as measured; 0 where it was not.
    """

    title: str
    memory_bytes: int
    cores: int = 0
    flops_per_s: float = 0.0


@dataclass(frozen=True)
class MachineBox:
    """A box, and how its speeds are known."""

    box: Box
    known: HowKnown
    said: str


def machine_box(seen: Sequence[RankDevice], staged: bool = False, measured: Links = NO_LINKS) -> MachineBox:
    """Return the box of ranks on these devices. ``staged``: messages go through main memory.
    ``measured``: how fast the ranks exchange, if they have timed it.
    """
    if seen[0].cores:
        return cpu_box(seen)
    kinds = [published_name(one.title) for one in seen]
    unknown = sorted({one.title for one, kind in zip(seen, kinds, strict=True) if not kind})
    kinds = [PLAIN_GPU] * len(seen) if unknown else kinds  # else speeds of some would be taken for known
    counted = Counter(kinds)
    figure = slowest_link(list(counted))
    if staged:
        figure = {**figure, "peer": False}
    is_linked = all(ALL_LINKED.search(one.title) and not NOT_LINKED.search(one.title) for one in seen)
    link = "NVLink" if is_linked and "nvlink_gb_per_s" in figure and not staged else "PCIe"
    devices = tuple(
        replace(device(kind), memory_bytes=one.memory_bytes) for one, kind in zip(seen, kinds, strict=True)
    )
    devices = as_measured(devices, [one.flops_per_s for one in seen])
    name = f"{'+'.join(f'{count}x{kind}' for kind, count in counted.items())}-{link}"
    known = measured_levels(measured)
    beyond = [level for level in links(figure, link, len(seen)) if level.ranks >= max(measured, default=1)]
    box = box_of(name, devices, figure, known + beyond)
    said = f"by published figures of {name}"
    if unknown:
        said = f"no figures of {', '.join(unknown)} are known, and those of {PLAIN_GPU} were taken"
    if measured:
        speed = min(one.bytes_per_s for one in measured.values()) / GIGA
        said += f", and the {speed:.1f} GB/s that these GPUs exchange, measured here"
    return MachineBox(box, "plain" if unknown else "published", said)


def over_machines(here: MachineBox, devices: int) -> MachineBox:
    """Return the box of so many devices in machines that are all taken to be as this one is."""
    box, count = here.box, len(here.box.devices)
    if devices == count:
        return here
    whole = replace(
        box,
        name=f"{-(-devices // count)}x{box.name}-{NETWORK_GBITS}G",
        devices=(box.devices * devices)[:devices],
        levels=(*box.levels, network_of(count, NETWORK_GBITS)),
        machine=count,
    )
    said = (
        f"{here.said}, if each machine is like this one, with {NETWORK_GBITS} Gbit/s between them, not"
        " measured"
    )
    return replace(here, box=whole, said=said)


def as_measured(devices: tuple[DeviceSpeeds, ...], flops_per_s: Sequence[float]) -> tuple[DeviceSpeeds, ...]:
    """Return the devices with speeds in the measured proportion; the fastest keeps its speed. If
    one speed was not measured, return them as they are.
    """
    fastest = max(flops_per_s)
    if min(flops_per_s) <= 0 or min(flops_per_s) == fastest:
        return devices
    whole, made = devices[flops_per_s.index(fastest)].matmul_flops_per_s, []
    for one, own in zip(devices, flops_per_s, strict=True):
        as_fast = whole * own / fastest / one.matmul_flops_per_s
        matmul, attention = one.matmul_flops_per_s * as_fast, one.attention_flops_per_s * as_fast
        made.append(replace(one, matmul_flops_per_s=matmul, attention_flops_per_s=attention))
    return tuple(made)


def published_name(title: str) -> str:
    """Return a GPU's name in the published figures; empty if they do not have it."""
    for kind in figures()["devices"]:
        words = r"\W*".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", kind))
        if re.search(rf"(?<![0-9A-Za-z]){words}(?![0-9A-Za-z])", title) and "Laptop" not in title:
            return kind
    return ""


def speed_of(title: str) -> float:
    """Return the FLOPs per second of a GPU by published figures; 0 if there are none."""
    kind = published_name(title)
    return device(kind).matmul_flops_per_s if kind else 0.0


def cpu_box(seen: Sequence[RankDevice]) -> MachineBox:
    """Return the box of ranks on the CPU. They compute in fp32, and have the checkpoint's pages in
    common, so memory is no limit.
    """
    figure = figures()["cpu"]
    moved = figure["memory_gb_per_s"] * GIGA
    devices = tuple(
        DeviceSpeeds(
            name="CPU",
            matmul_flops_per_s=(speed := figure["gflops_per_core"] * one.cores * GIGA),
            attention_flops_per_s=speed,
            memory_bytes=1000 * TERA,
            memory_bytes_per_s=moved,
            merge_bytes_per_s=moved * MERGE_BYTES / UNFUSED_MERGE_BYTES,
        )
        for one in seen
    )
    link = figure["link_gb_per_s"] * GIGA * ITEM_BYTES / FP32_BYTES
    levels = (Level(ranks=1, bytes_per_s=link, latency_s=figure["latency_us"] * MICRO),)
    box = Box(
        name=f"{len(seen)}xCPU",
        devices=devices,
        levels=levels,
        host_bytes_per_s=1000 * TERA,
        hop_s=figures()["hop"]["seconds"],
        overlaps=False,
    )
    return MachineBox(box, "plain", "by plain figures of a CPU, which were not measured here")
