"""How much memory a model's evaluations turned out to need beside its weights."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

KEPT = 64  # pictures of a model
SLACK = 0.9  # a count may be a little too high
MOST = 1.25  # times its count: what failed with more free failed for another reason


class Enough(NamedTuple):
    """The ``part`` of an evaluation's counted need that must be free before the evaluation is sent.
    ``failed`` is the largest part with which one ran out of memory.
    """

    part: float = SLACK
    failed: float = 0.0

    def ran(self, part: float) -> Enough:
        """Returns the new bound after an evaluation that ran with so much free."""
        failed = self.failed if self.failed < part else 0.0
        between = (failed + part) / 2 if failed else SLACK * part
        return Enough(max(SLACK * part, between), failed) if part < self.part else self

    def lacked(self, part: float) -> Enough:
        """Returns the new bound after an evaluation that ran out of memory with so much free."""
        return Enough(max(self.part, part / SLACK), max(self.failed, part)) if 0 < part < MOST else self


@dataclass(frozen=True)
class Picture:
    """A picture for a VAE or upscale model. ``work`` is decode, encode or upscale; ``ranks`` ranks
    were to compute it together.
    """

    work: str
    ranks: int
    shape: tuple[int, ...]

    def is_no_smaller(self, other: Picture) -> bool:
        """Whether it takes as much memory as another, or more: it has as many elements, and as many
        in each channel of a frame.
        """
        return (self.work, self.ranks) == (other.work, other.ranks) and all(
            math.prod(self.shape[place:]) >= math.prod(other.shape[place:]) for place in (0, -2)
        )


@dataclass(eq=False)
class Headroom:
    """The memory that a model's evaluations need beside its weights, as experience shows: ``more``
    bytes than their count. ``reloads`` counts how often the weights were loaded anew for that since
    an evaluation had room. ``has_restarted`` says that a fresh pool was started for it since then.
    """

    more: int = 0
    enough: Enough = field(default_factory=Enough)
    reloads: int = 0
    has_restarted: bool = False
    # That did not fit, with the bytes that the rank with least had free: a fresh pool has no more
    pictures: deque[tuple[Picture, int]] = field(default_factory=partial(deque, maxlen=KEPT))
