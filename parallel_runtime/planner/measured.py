"""Speeds of this machine as they were measured, and the files that keep them: of ranks on the CPU
by ``lab bench plan``, of GPUs by the ranks themselves.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .box import Box, DeviceSpeeds, Level
from .whole import ITEM_BYTES

VERSION = 4  # of the file: another one is measured anew
PLENTY = 1e15


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured. ``matmul`` and ``attention``: FLOPs per second of a model's forward while
    all ranks compute; ``beside_s``: of each block beside those; ``memory``: bytes per second; of
    what the parts of a ring's attention take beyond one over all keys, ``merge``; of the link
    between two ranks ``latency_s`` and ``link``, bytes per second.
    """

    matmul: float
    attention: float
    beside_s: float
    memory: float
    merge: float
    latency_s: float
    link: float

    def box(self, ranks: int, item_bytes: int) -> Box:
        """Return so many ranks that send elements of ``item_bytes``; counts are of bf16."""
        device = DeviceSpeeds(
            name="here",
            matmul_flops_per_s=self.matmul,
            attention_flops_per_s=self.attention,
            memory_bytes=PLENTY,
            memory_bytes_per_s=self.memory,
            beside_s=self.beside_s,
            merge_bytes_per_s=self.merge,
        )
        level = Level(ranks=1, bytes_per_s=self.link * ITEM_BYTES / item_bytes, latency_s=self.latency_s)
        return Box(
            name="here",
            devices=(device,) * ranks,
            levels=(level,),
            host_bytes_per_s=PLENTY,
            hop_s=0.0,
            overlaps=False,
        )


def this_machine() -> str:
    """Name what speeds depend on: processor, the cores of this process, and torch. Others are
    measured anew.
    """
    processor = platform.processor() or platform.machine()
    with suppress(OSError):  # Linux alone has it, and no other call tells one x86-64 from another
        found = re.search(
            r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
        )
        processor = found[1] if found is not None else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor}, {cores} cores, torch {torch.__version__}"


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


def read_speeds(file: Path, machine: str) -> dict[str, Speeds]:
    """Return the speeds that were measured on this machine, by model and ranks; empty where none
    were, or by another version.
    """
    found = stored(file)
    if (found.get("version"), found.get("machine")) != (VERSION, machine):
        return {}
    try:
        return {name: Speeds(**speeds) for name, speeds in found["speeds"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}


def write(file: Path, machine: str, speeds: dict[str, Speeds]) -> None:
    found = {name: asdict(one) for name, one in speeds.items()}
    replace_with(file, {"version": VERSION, "machine": machine, "speeds": found})


def stored(file: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one where it holds none."""
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
