"""Note when ranks were at work on an evaluation, and sum up how busy that made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """The time in which a rank worked on an evaluation, by its machine's monotonic clock. It waited
    ``waited_s`` of it for other ranks; ``by_axis`` splits the part that it waited for messages.
    """

    began_s: float
    ended_s: float
    waited_s: float
    by_axis: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.began_s - self.waited_s

    @property
    def came_in_s(self) -> float:
        """The moment at which its input was there: a stage waits before all else."""
        return self.began_s + self.waited_s


def waited_most(submissions: Iterable[Mapping[int, Span]]) -> dict[str, float]:
    """Return the seconds that a rank waited for messages, by axis: of the one that did so most."""
    of_rank: dict[int, Counter[str]] = {}
    for spans in submissions:
        for rank, span in spans.items():
            of_rank.setdefault(rank, Counter()).update(span.by_axis)
    return dict(max(of_rank.values(), key=lambda waited: sum(waited.values()), default={}))


def busy_shares(submissions: Sequence[Mapping[int, Span]]) -> list[float]:
    """Return, for each rank, the share of the time from the first to the last of these submissions
    in which it computed.
    """
    of_rank: dict[int, list[Span]] = {}
    for spans in submissions:
        for rank, span in spans.items():
            of_rank.setdefault(rank, []).append(span)
    if not of_rank:
        return []
    every = [span for spans in of_rank.values() for span in spans]
    whole = max(span.ended_s for span in every) - min(span.came_in_s for span in every)
    return [sum(span.busy_s for span in of_rank.get(rank, ())) / whole for rank in range(max(of_rank) + 1)]
