"""Name the rows of keys and values that each place of a ring keeps, and the rows that travel. Pure
arithmetic on ranges (begin, size) of tokens.

Each place keeps its share of the whole sequence. The fresh rows of a patch are shared out in the
same way, so a place may compute rows that another place keeps. A place sends its kept rows of all
tokens that are not computed now, then the fresh rows that it computed. Together, all places send
every token once, in its newest version, and each takes the rows that it keeps out of the passing
message.

Example: of 8 tokens on 2 places, place 0 keeps 0 to 3 and place 1 keeps 4 to 7. The patch of tokens
0 to 3 is fresh: place 0 computes and sends 0 and 1; place 1 sends its stale 4 to 7, then the fresh
2 and 3, which place 0 takes.
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
    """The rows of one ``place`` of a ring in one evaluation, and the rows that all places send.
    ``kept`` lists the tokens that each place keeps, ``fresh`` the tokens that each computes, in the
    order in which it has them.

    This place's K/V buffer has ``tokens`` tokens, in their own order. ``stale`` are the pieces of
    that buffer that this place sends (``there``: among the rows that it sends). For every place,
    ``sent`` are the tokens that it sends, ``fresh`` is how many of them at the end are fresh, and
    ``taken`` are the pieces of these that this place keeps.
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
    """Yield the parts of ``ranges`` that are in none of ``others``, which are in order: of (0, 8),
    without (2, 3), (0, 2) and (5, 3).
    """
    for at, size in ranges:
        end = at + size
        for begin, length in others:
            if at < min(begin, end):
                yield at, min(begin, end) - at
            at = max(at, begin + length)
        if at < end:
            yield at, end - at


def common(here: Iterable[Range], there: Sequence[Range]) -> Iterator[Piece]:
    """Yield the tokens that are in both lists of ranges, by their places in two tensors that have
    these ranges one after another.
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
