"""Name the rows of keys and values that each place of a ring keeps, and those that travel. Pure
arithmetic on ranges (begin, size) of tokens.

Each place keeps its share of the sequence, of whichever patches. The fresh rows of a patch are
shared out in the same way, so a place may compute some that another one keeps. What a place sends
around is what it keeps of the tokens that are not computed, then the fresh rows that it computed:
all places together send every token once, as last seen. Each takes what it keeps out of what
passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]  # (begin, size)


class Piece(NamedTuple):
    """``size`` rows that lie from ``here`` on in one tensor, and from ``there`` on in another."""

    here: int
    there: int
    size: int


class KeptRows:
    """The rows of one ``place`` of a ring in one evaluation, and what all places send. ``kept``:
    the tokens that each place keeps; ``fresh``: those that it computes, in the order in which it
    has them.

    ``tokens`` of this place's K/V buffer, which are in their own order; ``stale`` are the pieces of
    it that this place sends (there: among the rows that it sends). Of every place, ``sent`` are the
    tokens that it sends, ``fresh`` so many of them at the end, and ``taken`` the pieces of these
    that this place keeps.
    """

    def __init__(self, place: int, kept: Sequence[Sequence[Range]], fresh: Sequence[Sequence[Range]]):
        computed = union_of(one for ranges in fresh for one in ranges)
        own, stale = union_of(kept[place]), [[*left_of(union_of(ranges), computed)] for ranges in kept]
        self.tokens = tokens_in(own)
        self.stale = list(common(own, stale[place]))
        self.fresh = [tokens_in(ranges) for ranges in fresh]
        self.sent = [[*left, *ranges] for left, ranges in zip(stale, fresh, strict=True)]
        self.taken = [list(common(ranges, own)) for ranges in fresh]


def tokens_in(ranges: Iterable[Range]) -> int:
    return sum(size for _, size in ranges)


def union_of(ranges: Iterable[Range]) -> list[Range]:
    """Return the same tokens in their order, in as few ranges as can be."""
    found: list[Range] = []
    for begin, size in sorted(one for one in ranges if one[1]):
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((begin, size))
    return found


def left_of(ranges: Iterable[Range], others: Sequence[Range]) -> Iterator[Range]:
    """Yield what is in none of ``others``, which are in order."""
    for at, size in ranges:
        end = at + size
        for begin, length in others:
            if at < min(begin, end):
                yield at, min(begin, end) - at
            at = max(at, begin + length)
        if at < end:
            yield at, end - at


def common(here: Iterable[Range], there: Sequence[Range]) -> Iterator[Piece]:
    """Yield the tokens that are in both, by where they lie in tensors that have the ranges one
    after another.
    """
    here_at = 0
    for begin, size in here:
        there_at = 0
        for other, length in there:
            low, high = max(begin, other), min(begin + size, other + length)
            if low < high:
                yield Piece(here_at + low - begin, there_at + low - other, high - low)
            there_at += length
        here_at += size
