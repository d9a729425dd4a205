"""Note when ranks were at work on an evaluation, and sum up how busy that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The time in which a rank was at work on an evaluation, by its machine's monotonic clock;
    ``waited_s`` of it for other ranks.
    """

    began_s: float
    ended_s: float
    waited_s: float

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.began_s - self.waited_s

    @property
    def came_in_s(self) -> float:
        """The moment at which its input was there: a stage waits before all else."""
        return self.began_s + self.waited_s


def busy_shares(submissions: Sequence[Sequence[Span]]) -> list[float]:
    """Return, for each rank, the share of the time from the first to the last of these submissions
    in which it computed.
    """
    ranks = list(zip(*submissions, strict=True))
    if not ranks:
        return []
    whole = max(span.ended_s for rank in ranks for span in rank) - min(span.came_in_s for rank in ranks for span in rank)
    return [sum(span.busy_s for span in rank) / whole for rank in ranks]
