"""Asks NVIDIA's driver a fact about GPUs that torch does not tell: whether several processes may
use one at a time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

QUERY = ("nvidia-smi", "--query-gpu=uuid,compute_mode", "--format=csv,noheader")
ANSWERS_WITHIN_S = 20
SHARED = "default"  # the mode in which several processes may use a GPU


def ask_driver() -> str:
    """Returns the driver's answer; empty if there is no driver, or if it does not answer."""
    try:
        return subprocess.run(
            QUERY, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def modes_in(answer: str) -> Mapping[str, str]:
    """The compute mode, in small letters, of each GPU by its UUID."""
    lines = [line.split(",") for line in answer.splitlines()]
    return {
        parts[0].strip().removeprefix("GPU-"): parts[1].strip().lower() for parts in lines if len(parts) == 2
    }


def is_mig(name: str) -> bool:
    """True if a GPU of this name is an instance of one that is divided (MIG)."""
    return " MIG " in f"{name} "
