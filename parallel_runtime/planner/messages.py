"""The messages of each collective, as (source, target, bytes) of all ranks of a layout: all groups
of an axis send at the same time, so they meet on what they share.

Legend, as in expected.py: U ulysses, R ring, l tokens of a rank, g of its ulysses group, h heads of
a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..comm.shares import shares_of
from ..layout import Layout
from .box import Message
from .expected import ITEM_BYTES, group_tokens, rank_heads, rank_tokens
from .figures import Attended


def in_sequence(layout: Layout, rank: int) -> int:
    place = layout.coordinates(rank)
    return place["ring"] * layout.ulysses + place["ulysses"]


def heads_for_tokens(layout: Layout, attended: Attended, speeds: Sequence[int] = ()) -> Iterator[Message]:
    """q, k and v of the own tokens for each other rank's heads: 3 l h D. ``speeds`` of the ranks,
    here and below, as a placement has them.
    """
    heads, tokens = own_heads(layout, attended, speeds), own_tokens(layout, attended, speeds)
    for rank in range(layout.world_size):
        for other in layout.group("ulysses", rank):
            yield Message(rank, other, 3 * tokens[rank] * heads[other] * attended.head_dim * ITEM_BYTES)


def tokens_for_heads(layout: Layout, attended: Attended, speeds: Sequence[int] = ()) -> Iterator[Message]:
    """The own heads' output for each other rank's tokens: l h D."""
    heads, tokens = own_heads(layout, attended, speeds), own_tokens(layout, attended, speeds)
    for rank in range(layout.world_size):
        for other in layout.group("ulysses", rank):
            yield Message(rank, other, tokens[other] * heads[rank] * attended.head_dim * ITEM_BYTES)


def ring_step(layout: Layout, attended: Attended, speeds: Sequence[int] = ()) -> Iterator[Message]:
    """Keys and values of one group for the next rank of the ring: 2 g h D."""
    heads = own_heads(layout, attended, speeds)
    largest = [
        max(group_tokens(layout, attended, shares_of(layout.degrees(), first, speeds)))
        for first in sequences(layout)
    ]
    for rank in range(layout.world_size):
        ring = layout.group("ring", rank)
        following = ring[(layout.coordinates(rank)["ring"] + 1) % layout.ring]
        nbytes = (
            2 * largest[rank // (layout.ulysses * layout.ring)] * heads[rank] * attended.head_dim * ITEM_BYTES
        )
        yield Message(rank, following, nbytes)


def sequences(layout: Layout) -> range:
    """Return the first rank of each sequence."""
    return range(0, layout.world_size, layout.ulysses * layout.ring)


def own_tokens(layout: Layout, attended: Attended, speeds: Sequence[int]) -> list[int]:
    """Return the tokens of every rank."""
    return [
        own
        for first in sequences(layout)
        for own in rank_tokens(layout, attended, shares_of(layout.degrees(), first, speeds))
    ]


def own_heads(layout: Layout, attended: Attended, speeds: Sequence[int]) -> list[int]:
    """Return the heads of every rank."""
    groups = [
        rank_heads(layout, attended, shares_of(layout.degrees(), first, speeds))
        for first in sequences(layout)
    ]
    return [own for group in groups for _ in range(layout.ring) for own in group]


def stage_step(layout: Layout, nbytes: float) -> Iterator[Message]:
    """Hidden rows for the next stage: each rank of a stage sends its part."""
    for rank in range(layout.world_size):
        stage, stages = layout.coordinates(rank)["pipefusion"], layout.group("pipefusion", rank)
        if stage + 1 < layout.pipefusion:
            yield Message(rank, stages[stage + 1], nbytes / (layout.ulysses * layout.ring))


def weights_step(layout: Layout, nbytes: float) -> Iterator[Message]:
    """A block of ``nbytes`` from equal parts: each rank of a sequence sends its own to the
    others.
    """
    ranks = layout.ulysses * layout.ring
    for rank in range(layout.world_size):
        first = rank - in_sequence(layout, rank)
        for other in range(first, first + ranks):
            yield Message(rank, other, nbytes / ranks)
