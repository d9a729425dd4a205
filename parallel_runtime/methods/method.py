"""The contract between a rank and a parallel method: a way to run one model on several ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from ..comm.mesh import SequenceComm
from ..families.plan import TokenPlan
from ..layout import Layout
from ..patches import Part


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


class Method:
    """Runs one model's evaluations together with the other ranks, which all call the same methods
    in the same order.

    A method is made detached. Making it may cut the model down to what this rank runs. ``block_s``
    returns the seconds in each block that the evaluation at hand times, once the device has come to
    its end; keep it before the next evaluation begins.
    """

    attentions = 0  # of an evaluation: at each of them all ranks may leave it
    block_s: Callable[[], Mapping[int, float]] = dict

    def __init__(self, comm: SequenceComm):
        self._comm = comm
        self.part = Part(0, 0)  # that ``begin`` named

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        """Raise Refused or LayoutError if this method cannot run the model in this layout."""

    def attach(self) -> None:
        """Install the hooks on the model; it runs in parallel until ``detach``."""

    def detach(self) -> None:
        """Remove all that ``attach`` installed. ``attach`` may follow."""

    def begin(self, part: Part) -> None:
        """Open an evaluation. Data kept for another run, or for another attempt of this run, is
        void: some ranks may have kept data that others have not.
        """
        if (part.run, part.attempt) != (self.part.run, self.part.attempt):
            self.forget()
        self.part = part
        self._comm.begin(self.attentions, part)

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Compute the part that ``begin`` named. Return the output on the ranks that have it.

        ``number`` is the request's, the same on all ranks. Raises Stopped and Unlike on all ranks
        alike. If it raises anything else, other ranks may wait for messages of this rank; the
        ``Traffic`` of its communicators tells how far it came and whether any message is left.
        """

    def forget(self) -> None:
        """Free all that was kept for later evaluations of the run."""

    def end_run(self, room: int = -1) -> None:
        """Forget the run, and free the memory of messages unless it is at most ``room`` bytes."""
        self._comm.free_buffers(room)
        self.forget()  # last, because it may raise

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all that was kept for later evaluations of the run."""
        return 0


def free_frames(error: BaseException) -> None:
    """Free the local variables of all frames that ``error`` came through: they hold every tensor of
    the forward. The frames' lines can still be shown.
    """
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
