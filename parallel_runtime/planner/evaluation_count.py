"""Holds the counts of one evaluation of a model on a single device, from a shape-only run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

ITEM_BYTES = 2  # counts are of bf16


class Attended(NamedTuple):
    """One attention of the whole model that ranks share."""

    tokens: int
    heads: int
    head_dim: int

    @property
    def flops(self) -> int:
        """Of both products: scores, and their sum over values."""
        return 4 * self.tokens**2 * self.heads * self.head_dim


class Shareable(NamedTuple):
    """Bytes of weights that ranks of a sequence can share out: of each of the blocks, of all that
    is around them, and of the ``largest`` layer and the largest ``two``. ``aside``: bytes of
    weights that stay in the machine's memory then. ``layers``: the bytes of each, block by block,
    last of those around them, and of layers that are gathered ``together``; empty if they are not
    known.
    """

    blocks: Sequence[int]
    around: int
    largest: int
    two: int
    aside: int = 0
    layers: Sequence[Sequence[int]] = ()
    together: Sequence[Sequence[int]] = ()


class Activations(NamedTuple):
    """The tensors beside the weights: their bytes at the peak, and ``moved``, (bytes, kernels): how
    many kernels beside products and attentions read and write so many bytes. ``out_bytes`` are of
    the output; 0 if not counted.
    """

    peak_bytes: int
    moved: Sequence[tuple[int, int]] = ()
    out_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of a model's weights as they are stored, and of each of its blocks. A model that ranks
    never cut counts as one block.
    """

    weight_bytes: int
    block_weight_bytes: Sequence[int]
    shareable: Shareable


@dataclass(frozen=True, kw_only=True)
class Whole(ModelBytes):
    """One evaluation on a single device. ``around_flops`` are computed outside the blocks.
    ``tokens`` of each stream enter the blocks, ``hidden`` wide. ``block_launches``: kernels of each
    block, last the kernels around the blocks; empty if they were not counted.
    """

    block_flops: Sequence[int]
    around_flops: int
    activations: Activations
    attended_by_block: Sequence[Sequence[Attended]]
    tokens: Mapping[str, int]
    hidden: int
    block_launches: Sequence[int] = ()

    @property
    def flops(self) -> int:
        return self.around_flops + sum(self.block_flops)

    @property
    def launches(self) -> int:
        return sum(self.block_launches)

    @property
    def attended(self) -> Sequence[Attended]:
        return tuple(chain(*self.attended_by_block))
