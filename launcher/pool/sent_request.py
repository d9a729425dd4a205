"""A request that was sent to ranks, and what they have answered so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ...parallel_runtime.wire.messages import Done, Failed, Ready

Answer = Ready | Done | Failed


class Meets(Enum):
    """Names the ranks that one exchanges messages with while it handles a request."""

    NOBODY = "each rank works by itself"
    SEQUENCE = "all ranks of the group meet in collectives: one that fails goes through them until all leave"
    STAGES = "ranks hand hidden states on to the next stage: the others can leave early"


@dataclass
class SentRequest:
    """A request that ``group`` was sent. ``awaited``: a caller will collect the answers;
    ``owing``: the ranks that have not answered.
    """

    number: int
    group: tuple[int, ...]
    meets: Meets = Meets.NOBODY
    awaited: bool = True
    owing: set[int] = field(init=False)
    answers: dict[int, Answer] = field(default_factory=dict)
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.owing = set(self.group)

    @property
    def failures(self) -> dict[int, Failed]:
        return {rank: answer for rank, answer in self.answers.items() if isinstance(answer, Failed)}

    def take(self, rank: int, answer: Answer) -> None:
        """Notes a rank's answer. That of a rank that owes none is dropped."""
        if rank in self.owing:
            self.owing.discard(rank)
            self.answers[rank] = answer
            self.has_failed |= isinstance(answer, Failed)
