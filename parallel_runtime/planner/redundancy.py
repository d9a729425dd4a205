"""How much the output of each block changes from one evaluation of a run to the next (after arXiv
2411.13588), and how long a warm-up that asks for.

A patch attends to its neighbours' keys and values of the evaluation before. So a pipeline loses
little where blocks change little, and its warm-up should last until they do.

What was measured lies in a folder of the cache, under a digest of the model's file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

FOLDER = "redundancy"  # in the cache folder
SETTLED = 1.5  # times the median change of the run
EVALUATIONS_PER_WARM_UP = 20  # where nothing was measured
PARTS, PART_BYTES = 16, 1 << 16  # of a file, for its digest


@dataclass(frozen=True)
class Redundancy:
    """Change of each block, by its name: over each evaluation but the first, the distance to its
    output in the evaluation before, relative to that output.
    """

    changes: Mapping[str, Sequence[float]]

    @property
    def evaluations(self) -> int:
        return len(next(iter(self.changes.values()))) + 1

    @property
    def by_evaluation(self) -> list[float]:
        """The mean over all blocks, from the second evaluation on."""
        return [fmean(values) for values in zip(*self.changes.values(), strict=True)]


def warm_up_for(redundancy: Redundancy) -> int:
    """Return the fewest first evaluations, one at least, after which blocks change no more than
    ``SETTLED`` times what is usual in the run.
    """
    means = redundancy.by_evaluation
    usual = median(means)
    return next((number for number, change in enumerate(means, 1) if change <= SETTLED * usual), len(means))


@dataclass(frozen=True)
class WarmUp:
    """How many first ``evaluations`` of a run are whole, and ``why`` so many, for the report."""

    evaluations: int = 1
    why: str = ""


def warm_up_of(found: Sequence[Redundancy], evaluations: int) -> WarmUp:
    """Return the warm-up of a run of so many evaluations: the share of it that was measured over
    the nearest number, rounded up. Of equally near ones the longest counts.
    """
    if not found:
        return WarmUp(
            max(1, evaluations // EVALUATIONS_PER_WARM_UP),
            f"one in {EVALUATIONS_PER_WARM_UP}, as nothing was measured",
        )
    nearest = min(found, key=lambda one: (abs(one.evaluations - evaluations), -warm_up_for(one)))
    share = -(-warm_up_for(nearest) * evaluations // nearest.evaluations)
    return WarmUp(
        min(evaluations, share),
        f"until its blocks change little, as measured over {nearest.evaluations} evaluations",
    )


def digest_of(file: Path) -> str:
    """Tell models apart by the size of their file and by parts of it: it is not read whole."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for part in range(PARTS):
            stream.seek(max(0, size - PART_BYTES) * part // (PARTS - 1))
            digest.update(stream.read(PART_BYTES))
    return digest.hexdigest()[:12]


def read(folder: Path, file: str) -> list[Redundancy]:
    """Return what was measured of the model in ``file``, under all samplers and numbers of steps.
    Empty where nothing was, and without a file.
    """
    try:
        stored = sorted(folder.glob(f"*-{digest_of(Path(file))}-*.json"))
        return [Redundancy(json.loads(one.read_text(encoding="utf-8"))["changes"]) for one in stored]
    except (OSError, ValueError, KeyError, TypeError):
        return []
