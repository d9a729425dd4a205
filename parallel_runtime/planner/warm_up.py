"""How many first evaluations of a run under PipeFusion are whole.

A patch attends to its neighbours' keys and values of the evaluation before. So a pipeline loses
little where blocks change little, and its warm-up should last until they do: as long as
``python3 -m lab redundancy`` found for the model's file, in a folder of the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = "redundancy"  # in the cache folder
EVALUATIONS_PER_WARM_UP = 20  # where nothing was measured
PARTS, PART_BYTES = 16, 1 << 16  # of a file, for its digest


class MeasuredWarmUp(NamedTuple):
    """A run of so many ``evaluations`` whose blocks changed little after the first ``whole``."""

    whole: int
    evaluations: int


@dataclass(frozen=True)
class WarmUp:
    """How many first ``evaluations`` of a run are whole, and ``why`` so many, for the report."""

    evaluations: int = 1
    why: str = ""


def warm_up_of(found: Sequence[MeasuredWarmUp], evaluations: int) -> WarmUp:
    """Return the warm-up of a run of so many evaluations: the share of it that was measured over
    the nearest number, rounded up. Of equally near ones the longest counts.
    """
    if not found:
        return WarmUp(
            max(1, evaluations // EVALUATIONS_PER_WARM_UP),
            f"one in {EVALUATIONS_PER_WARM_UP}, as nothing was measured",
        )
    nearest = min(found, key=lambda one: (abs(one.evaluations - evaluations), -one.whole))
    share = -(-nearest.whole * evaluations // nearest.evaluations)
    return WarmUp(
        min(evaluations, share),
        f"until its blocks change little, as measured over {nearest.evaluations} evaluations",
    )


def read_warm_ups(folder: Path, file: str) -> list[MeasuredWarmUp]:
    """Return what was measured of the model in ``file``, under all samplers and numbers of steps.
    Empty where nothing was, and without a file.
    """
    try:
        stored = sorted(folder.glob(f"*-{file_digest(Path(file))}-*.json"))
        found = [json.loads(one.read_text(encoding="utf-8")) for one in stored]
        return [MeasuredWarmUp(int(one["warm_up"]), int(one["evaluations"])) for one in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def file_digest(file: Path) -> str:
    """Tell models apart by the size of their file and by parts of it: it is not read whole."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for part in range(PARTS):
            stream.seek(max(0, size - PART_BYTES) * part // (PARTS - 1))
            digest.update(stream.read(PART_BYTES))
    return digest.hexdigest()[:12]
