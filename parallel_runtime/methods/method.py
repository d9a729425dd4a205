"""The contract between a rank and a parallel method: a way to run one model on several ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from ..comm.in_step import Expected
from ..families.plan import TokenPlan
from ..layout import Layout
from ..patches import Part

ALONE = Expected()  # nothing is known of the steps to come
Progress = Literal["none", "some", "all"]


@dataclass(frozen=True)
class EvaluationFacts:
    """Figures of the evaluation at hand. ``messages_done``: how many of its messages to other ranks
    have gone through; a later evaluation would find the others. ``block_s`` returns the seconds in
    each block that was timed, when the device has come to the evaluation's end. ``confirmed``: as
    ``InStep`` has it. ``kept_bytes`` returns those of all that it keeps for later evaluations.
    """

    messages_done: Progress = "all"
    confirmed: int = 0
    block_s: Callable[[], Mapping[int, float]] = dict
    kept_bytes: Callable[[], int] = int


class Rank(Protocol):
    """Serves the method that runs in it."""

    def tick(self) -> None:
        """Note progress: a rank without any is taken for hung."""

    def note(self, phase: str) -> None:
        """Note a phase of the request at hand; users see some of them."""

    def next_part(self) -> Part | None:
        """Return the part that the next message asks for, if it has arrived and is for this
        model.
        """

    def reserve(self, nbytes: int) -> None:
        """Check that the device has so much free. Raises NoRoom."""


class Method(Protocol):
    """Runs one model's evaluations together with the other ranks, which all call the same methods
    in the same order.

    A method is made detached. Making it may cut the model down to what this rank runs.
    """

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        """Raise Refused or LayoutError where this method cannot run the model in this layout."""

    def attach(self) -> None:
        """Install the hooks on the model; it runs in parallel until ``detach``."""

    def detach(self) -> None:
        """Remove all that ``attach`` installed. ``attach`` may follow."""

    def begin(self, part: Part, expected: Expected = ALONE) -> None:
        """Open an evaluation. What was kept for one of another run is void. Call before anything
        that can raise, so that ``facts`` are of this evaluation. ``expected``: the same on all
        ranks.
        """

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Compute the part that ``begin`` named; return the output where this rank has it.

        ``number`` is the request's, the same on all ranks. Raises Stopped on all ranks alike. Where
        it raises anything else, this rank has gone through the messages that others wait for.
        """

    def fail(self, number: int) -> None:
        """Go through the messages of the evaluation that ``begin`` opened, because this rank failed
        before it came to ``forward``. Nothing happens after ``forward``. ``number``: as there.
        """

    def end_run(self, named: Collection[int] = (), room: int = -1) -> bool:
        """Free all that was kept for later evaluations of the run, and the memory of messages, but
        not where it is at most ``room`` bytes; return whether it stays. What is known of their
        steps does, all that may be ``named`` of it.
        """
        ...

    @property
    def facts(self) -> EvaluationFacts:
        """Return the figures of the evaluation that ``begin`` opened."""
        ...


def free_frames(error: BaseException) -> None:
    """Free what the frames hold that ``error`` came through: all that was being computed. Their
    lines can still be shown.
    """
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
