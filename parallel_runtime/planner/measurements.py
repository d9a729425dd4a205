"""Speeds of GPUs and of their links as ranks measured them, and the file that keeps them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from .box import Links, LinkSpeed

DEVICES = "devices.json"  # in the cache folder
LINKS = "links"  # in that file, beside the versions of torch
DRIVER = Path("/proc/driver/nvidia/version")


def read_devices(file: Path) -> dict[str, float]:
    """Return the FLOPs per second of GPUs, by their titles, that ranks have measured under this
    torch.
    """
    try:
        return {str(title): float(speed) for title, speed in stored(file)[torch.__version__].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_devices(file: Path, found: Mapping[str, float]) -> None:
    """Add GPUs that are not in the file. Those that are keep their speed, so that images stay the
    same to the last bit: without the file all are measured anew.
    """
    known = read_devices(file)
    if found.keys() - known.keys():
        replace_with(file, {**stored(file), torch.__version__: {**found, **known}})


def read_links(file: Path, versions: str) -> dict[str, Links]:
    """Return how fast ranks on GPUs exchange, by the addresses of the GPUs in the order of their
    ranks, as measured under these ``versions`` of driver, NCCL and torch.
    """
    try:
        return {
            addresses: {int(ranks): LinkSpeed(*map(float, speed)) for ranks, speed in links.items()}
            for addresses, links in stored(file)[LINKS][versions].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_links(file: Path, versions: str, addresses: str, links: Links) -> None:
    """Keep how fast ranks exchange, in place of what is kept of these GPUs, and of all GPUs under
    other versions.
    """
    known = {**read_links(file, versions), addresses: links}
    replace_with(file, {**stored(file), LINKS: {versions: known}})


def slowest_links(of_ranks: Sequence[Sequence[tuple[int, float, float]]]) -> Links:
    """Return the least speed and the longest latency that any rank has measured, by sizes of groups
    that all ranks have measured.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for size, *speed in (one for links in of_ranks for one in links):
        found.setdefault(size, []).append((speed[0], speed[1]))
    return {
        size: LinkSpeed(min(speed for speed, _ in each), max(latency for _, latency in each))
        for size, each in sorted(found.items())
        if len(each) == len(of_ranks)
    }


def link_versions() -> str:
    """Return what the speed of exchanges depends on beside the GPUs: torch, NCCL, its variables,
    and the driver.
    """
    try:
        library = ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError):  # torch for the CPU
        library = ""
    try:
        driver = re.search(r"[\d.]{5,}", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        driver = None
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    own = f"torch {torch.__version__}", f"NCCL {library}", f"driver {driver[0] if driver else ''}"
    return ", ".join([*own, *variables])


def stored(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_with(file: Path, found: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    part.replace(file)
