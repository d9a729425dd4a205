"""What ranks replayed as CUDA graphs for the first time, to be held to what they compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..crossing.rows import tensors_in
from .session import Sessions, Ticket

ROUNDING = 0.02  # of an output's size: what kernels that were chosen anew may be apart


@dataclass(frozen=True)
class Replayed:
    """What was ``answered`` by ranks that replayed, by ticket: the output, and their replies."""

    tickets: Sequence[Ticket]
    answered: Sequence[tuple[Any, Any]]

    def hold_to(self, computed: Sequence[tuple[Any, Any]], sessions: Sessions) -> None:
        """Rely on the graphs from now on, or on none any more where one is not right."""
        assert sessions.latest is not None  # that computed them
        apart = max(
            distance(one, other) for (one, _), (other, _) in zip(self.answered, computed, strict=True)
        )
        if apart > ROUNDING:
            sessions.leave_graphs(
                f"A CUDA graph came {apart:.1%} off what its kernels compute, whose image this is (please"
                " report it)"
            )
            return
        for ticket in self.tickets:  # a graph that was lost meanwhile has another number
            recorded = sessions.latest.models[ticket.run.model].recorded
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
