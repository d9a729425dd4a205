"""Count what a rank has loaded or patched, for the user who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..methods.method import Rank


class CountingRank(Rank, Protocol):
    def count(self, done: int, total: int) -> None:
        """Note how much of the request at hand is done."""


def counted(rank: CountingRank, total: int) -> Callable[[int], None]:
    """Return a function that is told how much more is done: bytes of a load, weights of a patching.
    All of it is ``total``.
    """
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        rank.tick()
        rank.count(min(done, total), total)

    add(0)
    return add
