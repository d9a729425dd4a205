"""Boxes that nobody here owns, from published figures of devices and links: ``published.json`` has
each with its source. No measured time or speed-up of a model is among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import LayoutError
from .box import Box, Cache, DeviceSpeeds, Level

FILE = Path(__file__).with_name("published.json")
ON_A_SOCKET = 4  # GPUs, as 8 in a machine of two sockets
# Link -> the socket's kind; PCIe: by the device's generation
LINKS = {"NVLink": "", "PCIe": "", "SPR": "SPR", "AMD": "AMD"}
MEGA, GIGA, TERA, MICRO = 1e6, 1e9, 1e12, 1e-6


@cache
def figures() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def box_of(
    name: str, devices: tuple[DeviceSpeeds, ...], figure: Mapping[str, Any], levels: list[Level]
) -> Box:
    """Return a machine of these devices. ``figure``: of their links."""
    known = figures()
    return Box(
        name=name,
        devices=devices,
        levels=tuple(levels),
        host_bytes_per_s=pcie(figure["pcie"]),
        hop_s=known["hop"]["seconds"],
        exchanges=tuple((int(ranks), us * MICRO) for ranks, us in known["exchange"]["us"].items()),
        patch_s=known["patch"]["seconds"],
    )


def slowest_link(kinds: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the links between these devices: links that all of them have."""
    of_each = [figures()["devices"][kind] for kind in dict.fromkeys(kinds)]
    slowest = min(of_each, key=lambda one: pcie(one["pcie"]))
    shared = {**slowest, "peer": all(one["peer"] for one in of_each)}
    if not all("nvlink_gb_per_s" in one for one in of_each):
        shared.pop("nvlink_gb_per_s", None)
    elif len(of_each) > 1:
        shared["nvlink_gb_per_s"] = min(one["nvlink_gb_per_s"] for one in of_each)
    return shared


def device(kind: str) -> DeviceSpeeds:
    known = figures()
    figure = known["devices"][kind]
    speed = TERA * known["matmul"].get(kind, figure["bf16_tflops"] * known["achieved"]["fraction"])
    memory = figure["memory_gb_per_s"] * GIGA * known["memory"]["fraction"]
    return DeviceSpeeds(
        name=kind,
        matmul_flops_per_s=speed,
        attention_flops_per_s=(
            known["attention"][kind]["tflops"] * TERA if kind in known["attention"] else speed
        ),
        memory_bytes=figure["memory_gb"] * GIGA,
        memory_bytes_per_s=memory,
        launch_s=known["launch"]["us"] * MICRO,
        processors=figure["processors"],
        cache=Cache(figure["cache_mb"] * MEGA, memory * known["cache"]["times_memory"]),
    )


def links(figure: dict[str, Any], link: str, count: int) -> list[Level]:
    """Return the ways between the devices of one machine. Without peer access each message is
    staged: it goes into main memory whole, then out of it.
    """
    latency = figures()["latency"]
    if link == "NVLink":
        if "nvlink_gb_per_s" not in figure:
            raise LayoutError("These devices have no NVLink to all others: choose PCIe.")
        return [
            Level(
                ranks=1,
                bytes_per_s=figure["nvlink_gb_per_s"] * GIGA,
                latency_s=(latency["base_us"] + latency["nvlink_us"]) * MICRO,
            )
        ]
    latency_s = (latency["base_us"] + latency["pcie_us"]) * MICRO
    port = pcie(figure["pcie"]) / (figures()["pcie"]["through_cpu"] if figure["peer"] else 2)
    ports = Level(ranks=1, bytes_per_s=port, latency_s=latency_s * (1 if figure["peer"] else 2))
    if count <= ON_A_SOCKET:
        return [ports]
    kind = LINKS[link] or ("SPR" if figure["pcie"] == "5" else "ICX")
    across = figures()["sockets"][kind]["gb_per_s"] * GIGA
    return [ports, Level(ranks=ON_A_SOCKET, bytes_per_s=across, latency_s=latency_s)]


def network_of(count: int, gbits: int) -> Level:
    """Return the way between machines of so many devices, as fast as 100 Gbit/s are known to be."""
    latency = figures()["latency"]
    speed = figures()["network"]["100G"]["gb_per_s"] * GIGA * gbits / 100
    return Level(
        ranks=count, bytes_per_s=speed, latency_s=(latency["base_us"] + latency["network_us"]) * MICRO
    )


def pcie(generation: str) -> float:
    """Return the bytes per second of sixteen lanes, each way."""
    return figures()["pcie"][generation] * GIGA
