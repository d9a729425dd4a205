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
MOST_VERSIONS = 4
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
            addresses: {
                int(ranks): LinkSpeed(float(speed), float(latency))
                for ranks, (speed, latency) in links.items()
                if speed > 0
            }
            for addresses, links in stored_links(file)[versions].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_links(file: Path, versions: str, addresses: str, links: Links) -> None:
    """Keep how fast ranks exchange, in place of what is kept of these GPUs under these versions,
    and of the oldest of more than ``MOST_VERSIONS``.
    """
    others = stored_links(file)
    known = {**others.pop(versions, {}), addresses: links}
    kept = dict([*others.items(), (versions, known)][-MOST_VERSIONS:])
    replace_with(file, {**stored(file), LINKS: kept})


def stored_links(file: Path) -> dict[str, Any]:
    found = stored(file).get(LINKS)
    return found if isinstance(found, dict) else {}


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


def fastest_links(before: Links, now: Links) -> Links:
    """Return the faster of two measurements, by sizes of groups."""
    return {size: max(filter(None, (before.get(size), now.get(size)))) for size in sorted({*before, *now})}


def link_versions() -> str:
    """Return what the speed of exchanges depends on beside the GPUs: torch, NCCL, its variables,
    and the driver.
    """
    try:
        library = ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError):  # torch for the CPU
        library = ""
    try:
        driver = re.search(r"[\d.]{5,}.*", DRIVER.read_text(encoding="utf-8"))  # its build too
    except OSError:
        driver = None
    named = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    variables = [f"{name}={named[name]}" for name in sorted(named) if not name.startswith("NCCL_DEBUG")]
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
    part = file.with_suffix(f".{os.getpid()}.part")  # another ComfyUI may write it too
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    part.replace(file)
