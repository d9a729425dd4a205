"""The messages of each collective, as (source, target, bytes) of all ranks of a layout: all groups
of an axis send at the same time, so they meet on what they share.

Legend, as in expected.py: U ulysses, R ring, l tokens of a rank, g of its ulysses group, h heads of
a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..comm.shares import Shares, shares_of
from ..layout import Layout
from .box import Message
from .expected import ITEM_BYTES, group_tokens, rank_heads, rank_tokens
from .figures import Attended


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
    largest = [max(group_tokens(layout, attended, shares)) for shares in shares_of_sequences(layout, speeds)]
    for rank in range(layout.world_size):
        ring = layout.group("ring", rank)
        following = ring[(layout.coordinates(rank)["ring"] + 1) % layout.ring]
        nbytes = 2 * largest[rank // layout.sequence_size] * heads[rank] * attended.head_dim * ITEM_BYTES
        yield Message(rank, following, nbytes)


def shares_of_sequences(layout: Layout, speeds: Sequence[int]) -> list[Shares]:
    return [shares_of(layout, ranks[0], speeds) for ranks in layout.sequences()]


def own_tokens(layout: Layout, attended: Attended, speeds: Sequence[int]) -> list[int]:
    """Return the tokens of every rank."""
    return [
        own for shares in shares_of_sequences(layout, speeds) for own in rank_tokens(layout, attended, shares)
    ]


def own_heads(layout: Layout, attended: Attended, speeds: Sequence[int]) -> list[int]:
    """Return the heads of every rank."""
    groups = [rank_heads(layout, attended, shares) for shares in shares_of_sequences(layout, speeds)]
    return [own for group in groups for _ in range(layout.ring) for own in group]


def stage_step(layout: Layout, nbytes: float) -> Iterator[Message]:
    """Hidden rows for the next stage: each rank of a stage sends its part."""
    for rank in range(layout.world_size):
        stage, stages = layout.stage(rank), layout.of_stages(rank)
        if stage + 1 < layout.stages:
            yield Message(rank, stages[stage + 1], nbytes / layout.sequence_size)


def weights_step(layout: Layout, nbytes: float) -> Iterator[Message]:
    """A block of ``nbytes`` from equal parts: each rank of a sequence sends its own to the
    others.
    """
    for rank in range(layout.world_size):
        for other in layout.sequence(rank):
            yield Message(rank, other, nbytes / layout.sequence_size)
