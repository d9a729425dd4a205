"""Where a rank sits in the grid, and whom it exchanges messages with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..comm.mesh import SequenceComm, connect
from ..comm.stage_link import StageLink
from ..layout import Layout

STAGE_STEPS = 1 << 20  # of progress: more than a stage makes in one request


@dataclass(frozen=True)
class Seat:
    """``sequence``: who shares tokens with this rank; ``link``: the stages before and after it,
    where the ranks are a pipeline.
    """

    layout: Layout
    rank: int
    sequence: SequenceComm
    link: StageLink | None = None

    @property
    def stage(self) -> int:
        return self.layout.coordinates(self.rank)["pipefusion"]

    @property
    def writes(self) -> bool:
        """Whether this rank has the output."""
        return self.rank == self.layout.writer

    @property
    def seconds(self) -> float:
        """Spent waiting for messages since the evaluation, or the patch of it, began."""
        return self.sequence.seconds + (self.link.seconds if self.link else 0.0)

    @property
    def sent_bytes(self) -> int:
        return self.sequence.sent_bytes + (self.link.sent_bytes if self.link else 0)


def take_seat(
    layout: Layout, rank: int, *, device_type: str, via_cpu: bool, wants_stop: Callable[[], bool], tick: Callable[[int], None]
) -> Seat:
    """Every rank must call it, after init_process_group where there are several.

    A rank that waits for the stage before it has come further than every rank of that stage,
    however many steps theirs takes.
    """
    sequence = connect(layout.mesh(), rank, device_type=device_type, via_cpu=via_cpu, wants_stop=wants_stop)
    if layout.pipefusion == 1:
        return Seat(layout, rank, sequence)
    stages = layout.group("pipefusion", rank)
    here = stages.index(rank)
    before, after = (stages[here - 1] if here else None), (stages[here + 1] if here + 1 < len(stages) else None)
    return Seat(layout, rank, sequence, StageLink(before, after, via_cpu=via_cpu, before_waiting=lambda: tick(here * STAGE_STEPS)))
