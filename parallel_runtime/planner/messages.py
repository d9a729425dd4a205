"""The messages of each collective, as (source, target, bytes) of all ranks of a layout. All groups
of an axis send at the same time, so they share links.

Legend: l tokens of a rank, g of its ulysses group, h heads of a rank, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ..comm.shares import shares_of
from ..layout import Layout, Split
from .box import SentBytes
from .evaluation_count import ITEM_BYTES, Attended


class SequenceParts(NamedTuple):
    """The shares of the ranks of one sequence in an attention: the ``tokens`` of each rank, the
    tokens of each of its ulysses ``groups``, and the ``heads`` of each rank of such a group.
    """

    tokens: tuple[int, ...]
    groups: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class SharedAttention:
    """One attention that the ranks of every sequence share. ``speeds`` of all ranks, as a placement
    has them; empty where they are alike.
    """

    layout: Layout
    attended: Attended
    speeds: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> list[SequenceParts]:
        """The parts of every sequence."""
        layout, found = self.layout, []
        for ranks in layout.sequences():
            shares = shares_of(layout, ranks[0], self.speeds)
            tokens = Split.by(shares.tokens, self.attended.tokens, layout.sequence_size, least=1).sizes
            firsts = range(0, layout.sequence_size, layout.ulysses)
            groups = tuple(sum(tokens[first : first + layout.ulysses]) for first in firsts)
            heads = Split.by(shares.heads, self.attended.heads, layout.ulysses).sizes
            found.append(SequenceParts(tokens, groups, heads))
        return found

    @cached_property
    def tokens(self) -> list[int]:
        """The tokens of every rank."""
        return [own for part in self.parts for own in part.tokens]

    @cached_property
    def heads(self) -> list[int]:
        """The heads of every rank."""
        return [own for part in self.parts for _ in range(self.layout.ring) for own in part.heads]

    @property
    def is_unlike(self) -> bool:
        """Whether ranks have parts of more than one size."""
        return len({*self.tokens}) > 1 or len({*self.heads}) > 1

    @property
    def output_elements(self) -> int:
        """The elements of the fullest rank's output."""
        return max(max(part.groups) * max(part.heads) for part in self.parts) * self.attended.head_dim

    def heads_for_tokens(self) -> Iterator[SentBytes]:
        """q, k and v of the own tokens for each other rank's heads: 3 l h D."""
        for rank, other in self._pairs():
            yield SentBytes(rank, other, 3 * self._nbytes(self.tokens[rank] * self.heads[other]))

    def tokens_for_heads(self) -> Iterator[SentBytes]:
        """The own heads' output for each other rank's tokens: l h D."""
        for rank, other in self._pairs():
            yield SentBytes(rank, other, self._nbytes(self.tokens[other] * self.heads[rank]))

    def ring_step(self) -> Iterator[SentBytes]:
        """Keys and values of one group for the next rank of the ring: 2 g h D."""
        layout = self.layout
        for rank in range(layout.world_size):
            ring = layout.group("ring", rank)
            following = ring[(layout.coordinates(rank)["ring"] + 1) % layout.ring]
            largest = max(self.parts[rank // layout.sequence_size].groups)
            yield SentBytes(rank, following, 2 * self._nbytes(largest * self.heads[rank]))

    @cached_property
    def exchanged_bytes(self) -> Counter[int]:
        """The bytes that each rank sends to its ulysses group."""
        sent: Counter[int] = Counter()
        for source, target, nbytes in chain(self.heads_for_tokens(), self.tokens_for_heads()):
            sent[source] += int(nbytes) * (source != target)
        return sent

    def passed_bytes(self, rank: int) -> int:
        """Return the bytes of keys and values that a rank passes on around its ring: its own
        group's, and all that pass by except the last.
        """
        layout, groups = self.layout, self.parts[rank // self.layout.sequence_size].groups
        # A rank's block has come round when it reaches the rank before it
        unsent = (layout.coordinates(rank)["ring"] + 1) % layout.ring
        return 2 * self._nbytes(self.heads[rank] * (sum(groups) - groups[unsent]))

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for rank in range(self.layout.world_size):
            for other in self.layout.group("ulysses", rank):
                yield rank, other

    def _nbytes(self, rows: int) -> int:
        return rows * self.attended.head_dim * ITEM_BYTES


def stage_step(layout: Layout, nbytes: float) -> Iterator[SentBytes]:
    """Hidden rows for the next stage: each rank of a stage sends its part."""
    for rank in range(layout.world_size):
        stage, stages = layout.stage(rank), layout.of_stages(rank)
        if stage + 1 < layout.stages:
            yield SentBytes(rank, stages[stage + 1], nbytes / layout.sequence_size)


def weights_step(layout: Layout, nbytes: float) -> Iterator[SentBytes]:
    """A block of ``nbytes`` from equal parts: each rank of a sequence sends its own to the
    others.
    """
    for rank in range(layout.world_size):
        for other in layout.sequence(rank):
            yield SentBytes(rank, other, nbytes / layout.sequence_size)
