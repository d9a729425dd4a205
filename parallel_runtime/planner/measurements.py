"""Speeds of GPUs as ranks measured them, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


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
