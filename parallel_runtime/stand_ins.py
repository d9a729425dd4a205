"""Change a value of the whole process while some threads need the change. A stand-in takes the
value's place; it knows the value and which threads are inside, so that no thread undoes the change
of another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

LOCK = threading.Lock()  # of all such changes: each takes no time


class StandIn:
    """``own``: the value in whose place it stands; ``inside``: how often each thread is inside."""

    def __init__(self, own: Any):
        self.own = own
        self.inside: Counter[int] = Counter()


Made = TypeVar("Made", bound=StandIn)


@contextmanager
def standing_in(holder: Any, name: str, kind: Callable[[Any], Made]) -> Iterator[None]:
    """Has a ``kind`` of the attribute's value stand in its place inside. The first thread to enter
    puts it there, and the last to leave takes it away.
    """
    thread = threading.get_ident()
    with LOCK:
        here = getattr(holder, name)
        if not isinstance(here, StandIn):
            here = kind(here)
            setattr(holder, name, here)
        here.inside[thread] += 1
    try:
        yield
    finally:
        with LOCK:
            here.inside[thread] -= 1
            here.inside = +here.inside
            if not here.inside and getattr(holder, name) is here:
                setattr(holder, name, here.own)
