"""CUDA graphs in one evaluation's attempts: what is replayed, what is held to a computation, and
what is given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..crossing.rows import tensors_in
from .session import Sessions, Ticket

ROUNDING = 0.02  # of an output's size: what kernels that were chosen anew may be apart
NO_ROOM = "Beside CUDA graphs no memory is left for an evaluation"
FAILED = "The first replay of a CUDA graph failed"


class Replayed:
    """Says what ranks may do in the next attempt at an evaluation of ``model``, ``graph``: "replay"
    a CUDA graph, "record" one (and compute), or "none": compute, and give up the model's graphs.

    The first replay of each graph is held to what ranks compute. A graph that is wrong, fails or
    leaves no memory for an evaluation is the last one of these ``sessions``.
    """

    def __init__(self, sessions: Sessions, model: str):
        self.graph = "replay"
        self._model = model
        self._sessions = sessions
        self._first: tuple[Sequence[Ticket], Sequence[tuple[Any, Any]]] | None = None

    def counts(self, tickets: Sequence[Ticket], answered: Sequence[tuple[Any, Any]]) -> bool:
        """Returns whether what was ``answered``, by ticket the output and the replies, is the
        evaluation's. A graph's first replay is not: the next attempt computes it.
        """
        session = self._sessions.latest
        assert session is not None  # that answered
        session.tries_graphs = False
        if self._first is not None:
            self._hold_to(answered, *self._first)
        elif any([ticket.unproven for ticket in tickets]):
            self.graph, self._first = "record", (tickets, answered)
            return False
        if self.graph == "none":
            self._sessions.leave_graphs(NO_ROOM)  # there was room when graphs were gone
        return True

    def make_room(self) -> bool:
        """Has ranks give up the model's graphs in the next attempt, as they had no memory for this
        one. Returns whether a rank may hold such a graph.
        """
        session = self._sessions.latest
        assert session is not None  # that answered
        session.tries_graphs = False
        resident = session.models.get(self._model)
        has_graphs = resident is not None and resident.has_graphs
        if resident is not None:
            resident.forget_graphs()
        self.graph = "none" if has_graphs else "record"
        return has_graphs

    def fail(self, tickets: Sequence[Ticket]) -> None:
        """Does without graphs from now on if the evaluation that failed replayed one for the first
        time, or another of ``tickets`` did.
        """
        if any([ticket.unproven for ticket in tickets]):
            self._sessions.leave_graphs(FAILED)

    def _hold_to(
        self,
        computed: Sequence[tuple[Any, Any]],
        tickets: Sequence[Ticket],
        replayed: Sequence[tuple[Any, Any]],
    ) -> None:
        """Relies on the graphs from now on, or on none any more where one is not right."""
        assert self._sessions.latest is not None  # that computed them
        apart = max(distance(one, other) for (one, _), (other, _) in zip(replayed, computed, strict=True))
        if apart > ROUNDING:
            self._sessions.leave_graphs(
                f"A CUDA graph came {apart:.1%} off what its kernels compute, whose image this is (please"
                " report it)"
            )
            return
        for ticket in tickets:  # a graph that was lost meanwhile has another number
            resident = self._sessions.latest.models.get(ticket.run.model)
            recorded = resident.recorded if resident is not None else {}  # it may have been released
            graphs = recorded.get(ticket.like)
            if graphs is not None and graphs.numbers == ticket.unproven:
                recorded[ticket.like] = graphs._replace(are_right=True)


def distance(replayed: Any, computed: Any) -> float:
    """Returns the root mean square of what outputs differ by, over that of the computed one."""
    ours, theirs = (
        torch.cat([one.float().flatten() for one in tensors_in(of)]) for of in (replayed, computed)
    )
    apart = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt().clamp(min=1e-30))
    return math.inf if math.isnan(apart) else apart
