"""Remember which pictures did not fit the ranks' memory, so that the ranks need not run out of it
again at each of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import OutOfMemory
from ..planner.keeping import as_gib
from .run import PooledModel
from .runs import tell
from .session import Sessions

KEPT = 64  # pictures of all VAEs and upscale models
MORE = 1.1  # times as much as was free before: then it is tried again


@dataclass(frozen=True)
class Picture:
    """A picture that so many ``ranks`` together were to ``work`` on, by the VAE ``model``."""

    model: PooledModel
    work: str
    ranks: int
    shape: tuple[int, ...]

    def is_no_smaller(self, other: Picture) -> bool:
        """Whether it takes as much memory as another, or more: it has as many elements, and as many
        in each channel of a frame.
        """
        return (self.model, self.work, self.ranks) == (other.model, other.work, other.ranks) and all(
            math.prod(self.shape[place:]) >= math.prod(other.shape[place:]) for place in (0, -2)
        )


class TooLarge:
    """Knows it for one pool, for as long as ComfyUI runs: a fresh pool has no more memory."""

    def __init__(self, sessions: Sessions):
        self._sessions = sessions
        # With the bytes that the rank with least had free
        self._failed: deque[tuple[Picture, int]] = deque(maxlen=KEPT)

    @contextmanager
    def trying(self, model: PooledModel, work: str, ranks: int, shape: Sequence[int]) -> Iterator[None]:
        """Raises OutOfMemory for a picture that is no smaller than one that did not fit before,
        unless ranks have more free memory by now. Notes the picture if ranks run out of memory
        inside. Call it while they hold the model.
        """
        session, picture = self._sessions.latest, Picture(model, work, ranks, tuple(shape))
        assert session is not None
        before = [room for one, room in self._failed if picture.is_no_smaller(one)]
        if before:
            tell(session, model, ())  # they measure what is free now
            if (now := min(session.room)) <= MORE * max(before):
                raise OutOfMemory(
                    f"The workers are not asked to {work} {' x '.join(map(str, shape))} in one piece: they"
                    f" ran out of memory with a picture no larger, and with {as_gib(now)} free on the fullest"
                    " device they have no more than then. Smaller pieces are taken."
                )
        try:
            yield
        except OutOfMemory:
            self._failed.append((picture, min(session.room)))
            raise
