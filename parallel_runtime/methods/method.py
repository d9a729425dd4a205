"""The contract between a rank and a parallel method: a way to run one model on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

from ..families.plan import TokenPlan
from ..layout import Layout
from ..patches import Part

Progress = Literal["none", "some", "all"]


@dataclass(frozen=True)
class Facts:
    """Figures of the evaluation at hand. ``messages_done``: how many of its messages between stages
    have gone through; a later evaluation would find the others. ``block_s``: seconds in each block
    that was timed.
    """

    messages_done: Progress = "all"
    block_s: Mapping[int, float] = field(default_factory=dict)


class Rank(Protocol):
    """Serves the method that runs in it."""

    def tick(self) -> None:
        """Note progress: a rank without any is taken for hung."""

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

    def begin(self, part: Part) -> None:
        """Open an evaluation. A new run ends the one before. Call before anything that can raise,
        so that ``facts`` are of this evaluation.
        """

    def evaluate(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Compute the part that ``begin`` named; return the output where this rank has it.

        ``number`` is the request's, the same on all ranks. Raises Stopped on all ranks alike.
        """

    def end_run(self) -> None:
        """Free all that was kept for later evaluations of the run."""

    @property
    def facts(self) -> Facts:
        """Return the figures of the evaluation that ``begin`` opened."""
        ...
