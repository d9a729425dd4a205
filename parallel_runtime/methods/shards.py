"""How one evaluation's tokens are split over the ranks of a sequence. Pure arithmetic on sizes and
indices.

Rows of a rank: what it computes, [stream 0 | stream 1 | ...], each stream an uneven contiguous
part. Rank-major order: rank 0's rows of all streams, then rank 1's, and so on; it is the order in
which attention sees tokens after an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ModelError
from ..families.plan import Along, Ranges
from ..layout import Split, clip_ranges


class Rows:
    """The part of each stream that is computed here: ``carried`` (start, size) of its ``totals``
    rows, streams in the plan's order.
    """

    def __init__(self, totals: Mapping[str, int], carried: Mapping[str, tuple[int, int]]):
        self.totals = totals
        self.carried = carried
        self._made: dict[tuple, tuple[Any, Any]] = {}

    def slice(self, tensor: torch.Tensor, dim: int, streams: Sequence[str]) -> torch.Tensor:
        """The rows carried of a tensor that holds ``streams`` one after another along ``dim``."""
        parts, offset = [], 0
        for stream in streams:
            start, size = self.carried[stream]
            parts.append(tensor.narrow(dim, offset + start, size))
            offset += self.totals[stream]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def along(self, tensor: torch.Tensor, item: Along) -> torch.Tensor:
        """The rows carried of an argument that runs along tokens. Raises ModelError where the plan
        does not fit the model.
        """
        rows, total = tensor.shape[item.dim], sum(self.totals[stream] for stream in item.streams)
        if rows == 1:
            return tensor
        if rows == total:
            return self.once(tensor, (item.dim,), lambda: self.slice(tensor, item.dim, item.streams))
        if item.repeated and rows < total:
            return self.once(tensor, (item.dim,), lambda: self._repeated(tensor, item, total))
        raise ModelError(f"{item.arg} has {rows} rows for {total} tokens: this model cannot be split by its plan.")

    def _repeated(self, tensor: torch.Tensor, item: Along, total: int) -> torch.Tensor:
        rows = tensor.shape[item.dim]
        run = total // rows if total % rows == 0 else total // rows + 1
        source = torch.arange(total, device=tensor.device) // run
        return tensor.index_select(item.dim, self.slice(source, 0, item.streams))

    def ranges(self, ranges: list, item: Ranges) -> list[tuple]:
        """Token ranges of the whole stream -> the parts of them in the rows carried."""
        start, size = self.carried[item.stream]
        if item.after is None:
            return clip_ranges(ranges, start, size)
        shift = self.carried[item.after][1]  # what the host added: the local length of the stream before
        stream_ranges = [(0 if begin == 0 else begin - shift, end - shift, *rest) for begin, end, *rest in ranges]
        reaches_front = [tuple(rest) for begin, _end, *rest in ranges if begin == 0]
        return [(0, shift, *rest) for rest in reaches_front] + clip_ranges(stream_ranges, start, size, offset=shift)

    def once(self, value: Any, key: tuple, make: Callable[[], Any]) -> Any:
        """``make()`` for the first block that brings this very object, remembered for the other
        blocks of the evaluation.
        """
        full_key = (id(value), *key)
        if full_key not in self._made:
            self._made[full_key] = (value, make())
        return self._made[full_key][1]


class Shards(Rows):
    """The streams of one evaluation, seen from one rank of ``size``: each split evenly over them,
    as far as it goes.

    ``parts``: where only a part (start, size) of the streams is computed at all.
    """

    def __init__(self, totals: Mapping[str, int], rank: int, size: int, parts: Mapping[str, tuple[int, int]] | None = None):
        self.rank = rank
        self.size = size
        self.parts = parts or {stream: (0, total) for stream, total in totals.items()}
        self.splits = {stream: Split.even(count, size) for stream, (_, count) in self.parts.items()}
        super().__init__(totals, {stream: self._carried(stream, total) for stream, total in totals.items()})
        self._joint: dict[tuple[str, ...], Joint] = {}

    def _carried(self, stream: str, total: int) -> tuple[int, int]:
        """A rank that owns none carries row 0 as an anchor: host blocks cannot view an empty
        stream. Anchors never take part in attention or in the result.
        """
        split = self.splits[stream]
        own = (self.parts[stream][0] + split.starts[self.rank], split.sizes[self.rank])
        return own if own[1] else (0, min(1, total))

    def joint(self, streams: tuple[str, ...]) -> Joint:
        if streams not in self._joint:
            self._joint[streams] = Joint(self, streams)
        return self._joint[streams]


class Joint:
    """Streams that attention sees as one sequence."""

    def __init__(self, shards: Shards, streams: Sequence[str]):
        self._shards = shards
        self._streams = streams
        splits = [shards.splits[stream] for stream in streams]
        self.counts = [sum(split.sizes[rank] for split in splits) for rank in range(shards.size)]  # tokens owned by each rank
        self.owned: list[tuple[int, int]] = []  # (start, size) of each stream's owned rows within the carried ones
        self.carried = 0
        for stream, split in zip(streams, splits, strict=True):
            self.owned.append((self.carried, split.sizes[shards.rank]))
            self.carried += shards.carried[stream][1]
        self._ranges: list[tuple[int, int]] | None = None
        self._order: torch.Tensor | None = None

    @property
    def total(self) -> int:
        """Tokens that are computed, on all ranks."""
        return sum(self.counts)

    @property
    def whole(self) -> int:
        """Tokens that there are."""
        return sum(self._shards.totals[stream] for stream in self._streams)

    @property
    def carries_anchor(self) -> bool:
        return self.carried != self.counts[self._shards.rank]

    def drop_anchors(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.carries_anchor:
            return tensor
        parts = [tensor.narrow(dim, start, size) for start, size in self.owned if size] or [tensor.narrow(dim, 0, 0)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def put_back(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of ``drop_anchors``, with zeros in anchor rows."""
        if not self.carries_anchor:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = self.carried
        out = tensor.new_zeros(shape)
        for (start, size), rows in zip(self.owned, tensor.split([size for _, size in self.owned], dim), strict=True):
            out.narrow(dim, start, size).copy_(rows)
        return out

    def ranges(self) -> Sequence[tuple[int, int]]:
        """(begin, size) in the host's order of all tokens there are, of every rank's part of every
        stream, in rank-major order.
        """
        if self._ranges is None:
            self._ranges = []
            for rank in range(len(self.counts)):
                offset = 0
                for stream in self._streams:
                    split = self._shards.splits[stream]
                    self._ranges.append((offset + self._shards.parts[stream][0] + split.starts[rank], split.sizes[rank]))
                    offset += self._shards.totals[stream]
        return self._ranges

    def rank_major(self) -> torch.Tensor:
        """(total,): position in rank-major order -> position in the host's order of all tokens
        there are.
        """
        if self._order is None:
            self._order = torch.cat([torch.arange(begin, begin + size) for begin, size in self.ranges()])
        return self._order


def permute_mask(mask: torch.Tensor, joint: Joint) -> torch.Tensor:
    """A host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) in rank-major token order. Raises
    ModelError if it is of another length.
    """
    order = joint.rank_major().to(mask.device)
    if mask.shape[-1] == joint.total:
        mask = mask.index_select(-1, order)
    elif mask.shape[-1] != 1:
        raise ModelError(f"The attention mask covers {mask.shape[-1]} tokens, the model has {joint.total}: give it one column per token.")
    if mask.ndim > 1 and mask.shape[-2] == joint.total:
        mask = mask.index_select(-2, order)
    return mask


def part_of_mask(mask: torch.Tensor, rows: slice, columns: slice, heads: slice, total: int, all_heads: int) -> torch.Tensor:
    """The part of a rank-major mask for some queries, keys and heads; dimensions of size 1 stay."""
    if mask.shape[-1] == total:
        mask = mask[..., columns]
    if mask.ndim > 1 and mask.shape[-2] == total:
        mask = mask[..., rows, :]
    if mask.ndim == 4 and mask.shape[1] == all_heads > 1:
        mask = mask[:, heads]
    return mask
