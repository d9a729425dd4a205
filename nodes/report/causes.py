"""Why a layout was taken, and what kept a run from being faster: as words that every language has a
text for, and in English for the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...parallel_runtime.layout import AXES
from .figures import KeptWeights, LastRun

WAITED_FOR = 1.2  # a rank that computed so many times as long as the least busy one makes it wait
MUCH = 0.2  # of a run that went into communication
WHY = {
    **{axis.name: axis.why for axis in AXES},
    "alone": "one rank computes everything",
}
SLOWED = {
    "communication": ("communication took {} of the time: try fewer GPUs, or a faster link between them"),
    "imbalance": "the other ranks waited for rank {}",
    "single_timeline": "the patches waited for each other: {}",
    "sharded": "the weights of {} are gathered from all ranks at every evaluation",
    "uncompiled": (
        "the ranks did not compile {}, because its weights are sharded; whole weights are compiled"
    ),
    "offloaded": "weights of {} come from main memory at every evaluation",
    "shared_device": "several ranks share {}",
}


@dataclass(frozen=True)
class Cause:
    """``word``: of ``WHY`` or ``SLOWED``; ``value``: what goes into its text."""

    word: str
    value: str = ""

    @property
    def english(self) -> str:
        return {**WHY, **SLOWED}[self.word].format(self.value)


def why_layout(degrees: dict[str, int]) -> tuple[Cause, ...]:
    """Says what each axis of a layout is good for."""
    used = tuple(Cause(axis, str(degree)) for axis, degree in degrees.items() if degree > 1)
    return used or (Cause("alone"),)


def slowed(devices: Sequence[str], kept: Sequence[KeptWeights], run: LastRun) -> tuple[Cause, ...]:
    """Lists what kept the ranks on these devices from being faster, the plainest first."""
    found = []
    if run.exchange_share is not None and run.exchange_share > MUCH:
        found.append(Cause("communication", f"{run.exchange_share:.0%}".replace("%", " %")))
    if run.busy and max(run.busy) > WAITED_FOR * min(run.busy):
        found.append(Cause("imbalance", str(max(range(len(run.busy)), key=run.busy.__getitem__))))
    mode, _, reason = run.in_patches.mode.partition(", because of ") if run.in_patches else ("", "", "")
    if mode == "single-timeline" and reason:
        found.append(Cause("single_timeline", reason))
    found += [Cause(one.kept, one.model) for one in kept if one.kept in SLOWED]
    found += [
        Cause("uncompiled", one.model)
        for one in kept
        if one.kept == "sharded" and one.model == run.to_compile
    ]
    gpus = [name for name in devices if not name.endswith("cpu")]
    found += [Cause("shared_device", name) for name in dict.fromkeys(gpus) if gpus.count(name) > 1]
    return tuple(found)
