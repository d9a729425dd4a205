"""Runs: one sampling of one model, from ``pre_run`` to ``cleanup``, and its figures."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ..occupancy import Span
from ..patches import Part
from ..schedule import Submission
from ..wire.messages import Done


@dataclass(frozen=True)
class Evaluation:
    """Holds the figures of one evaluation, or of one patch of it, which may overlap with others.

    ``seconds`` around it in the UI since ``began``; ``hop_s`` of them beside the slowest rank's
    computation; ``exchange_s`` and ``sent_bytes`` of the rank with most. ``spans``: every rank's.
    ``part``: what of it a pipeline computed; None where the ranks are none.
    """

    seconds: float
    hop_s: float
    exchange_s: float
    sent_bytes: int
    began: float = 0.0
    part: Part | None = None
    spans: tuple[Span, ...] = ()


@dataclass(eq=False)
class Run:
    """Keeps the figures of one run, and the names by which ranks know it. ``id``: the run's number;
    a new one where what ranks keep of it is void. ``mode`` of a pipeline; empty where the ranks
    are none. ``is_sampled``: a sampler announced it, and will end it. ``joined``: the models whose
    runs end with this one.

    The report may look at any moment, so an evaluation is added whole.
    """

    id: int = 0
    model: str = ""
    mode: str = ""
    began_s: float = field(default_factory=time.time)
    evaluations: list[Evaluation] = field(default_factory=list)
    branches: dict[Hashable, int] = field(default_factory=dict)
    is_sampled: bool = False
    joined: list[str] = field(default_factory=list)
    ended_s: float = 0.0  # 0 while it goes on

    def number_of(self, branch: Hashable) -> int:
        """Returns the number by which ranks know this branch of the run."""
        return self.branches.setdefault(branch, len(self.branches))


def submissions(evaluations: Iterable[Evaluation]) -> list[Submission]:
    """Returns what a pipeline computed, in the order of submission."""
    parts = [(one, one.part) for one in evaluations if one.part is not None]
    return [Submission(part.branch, part.patch[0] if part.patch else None, one.began, one.spans) for one, part in parts]


def measured(began: float, replies: Iterable[Done], part: Part | None) -> Evaluation:
    """Sums up the ranks' answers to an evaluation that ended just now."""
    replies = list(replies)
    seconds = time.perf_counter() - began
    return Evaluation(
        seconds=seconds,
        hop_s=seconds - max(reply.compute_s for reply in replies),
        exchange_s=max(reply.exchange_s for reply in replies),
        sent_bytes=max(reply.sent_bytes for reply in replies),
        began=began,
        part=part,
        spans=tuple(Span(reply.began_s, reply.began_s + reply.compute_s, reply.exchange_s) for reply in replies),
    )
