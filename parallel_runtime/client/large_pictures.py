"""Remember which pictures did not fit the ranks' memory, so that the ranks need not run out of it
again at each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import OutOfMemory
from ..planner.keeping import as_gib
from .headroom import Picture
from .run import PooledModel
from .runs import tell
from .session import Session

MORE = 1.1  # times as much as was free before: then it is tried again


@contextmanager
def trying(session: Session, model: PooledModel, picture: Picture) -> Iterator[None]:
    """Raises OutOfMemory for a picture that is no smaller than one that did not fit before, unless
    ranks have more free memory by now. Notes the picture if ranks run out of memory inside. Call it
    while they hold the model.
    """
    failed = model.headroom.pictures
    before = [room for one, room in failed if picture.is_no_smaller(one)]
    if before:
        tell(session, model, ())  # they measure what is free now
        if (now := min(session.room)) <= MORE * max(before):
            raise OutOfMemory(
                f"The workers are not asked to {picture.work} {' x '.join(map(str, picture.shape))} in one"
                " piece: they ran out of memory with a picture no larger, and the fullest device has no more"
                f" free memory now ({as_gib(now)}). Smaller pieces are taken."
            )
    try:
        yield
    except OutOfMemory:
        failed.append((picture, min(session.room)))
        raise
