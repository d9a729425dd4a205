"""The messages of each collective, as (source, target, bytes) of all ranks of a layout: all groups
of an axis send at the same time, so they meet on what they share.

Legend, as in expected.py: U ulysses, R ring, l tokens of a rank, g of its ulysses group, h heads of
a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Layout, Split
from .box import Message
from .expected import ITEM_BYTES, group_tokens, rank_tokens
from .figures import Attended


def in_sequence(layout: Layout, rank: int) -> int:
    place = layout.coordinates(rank)
    return place["ring"] * layout.ulysses + place["ulysses"]


def heads_for_tokens(layout: Layout, attended: Attended) -> Iterator[Message]:
    """q, k and v of the own tokens for each other rank's heads: 3 l h D."""
    heads, tokens = Split.even(attended.heads, layout.ulysses).sizes, rank_tokens(layout, attended)
    for rank in range(layout.world_size):
        for index, other in enumerate(layout.group("ulysses", rank)):
            yield Message(rank, other, 3 * tokens[in_sequence(layout, rank)] * heads[index] * attended.head_dim * ITEM_BYTES)


def tokens_for_heads(layout: Layout, attended: Attended) -> Iterator[Message]:
    """The own heads' output for each other rank's tokens: l h D."""
    heads, tokens = Split.even(attended.heads, layout.ulysses).sizes, rank_tokens(layout, attended)
    for rank in range(layout.world_size):
        own = heads[layout.coordinates(rank)["ulysses"]]
        for other in layout.group("ulysses", rank):
            yield Message(rank, other, tokens[in_sequence(layout, other)] * own * attended.head_dim * ITEM_BYTES)


def ring_step(layout: Layout, attended: Attended) -> Iterator[Message]:
    """Keys and values of one group for the next rank of the ring: 2 g h D."""
    heads = Split.even(attended.heads, layout.ulysses).sizes
    largest = max(group_tokens(layout, attended))
    for rank in range(layout.world_size):
        place, ring = layout.coordinates(rank), layout.group("ring", rank)
        following = ring[(place["ring"] + 1) % layout.ring]
        yield Message(rank, following, 2 * largest * heads[place["ulysses"]] * attended.head_dim * ITEM_BYTES)


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
