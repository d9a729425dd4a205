"""What is measured of a run, for the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..occupancy import Span
from ..patches import Part
from ..wire.messages import Done


@dataclass(frozen=True)
class Evaluation:
    """Measured of one evaluation, or of a part of it in a pipeline, whose parts overlap: seconds
    around it in the UI since ``began``, and the slowest rank's share of them. ``spans``: every
    rank's.
    """

    seconds: float
    hop_s: float
    exchange_s: float
    sent_bytes: int
    began: float = 0.0
    part: Part | None = None
    spans: tuple[Span, ...] = ()


@dataclass
class RunFigures:
    """Of one run, for the report; which may ask at any moment, so an evaluation is added whole."""

    began_s: float = field(default_factory=time.time)
    evaluations: list[Evaluation] = field(default_factory=list)
    mode: str = ""  # how a pipeline samples


def measured(began: float, replies: list[Done], part: Part | None = None) -> Evaluation:
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
