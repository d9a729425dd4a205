"""Split one evaluation's tokens over the ranks of a sequence. Pure arithmetic on sizes and indices.

A rank computes [stream 0 | stream 1 | ...], of each stream one contiguous part. Attention sees
tokens in rank-major order: rank 0's rows of all streams, then rank 1's, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from ..comm.device_copies import to_device
from ..errors import ModelError
from ..families.plan import Along, Boundary, Ranges
from ..layout import Split, clip_ranges

T = TypeVar("T")


class KeysByFrame(NamedTuple):
    """Local keys and values (B, H, l, D) of ``stream``, which tokens of the frame behind look at
    beside all of their own. A frame has ``tokens``, those of the first one look at none of these.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stream: str
    tokens: int

    def segments(self, start: int, end: int) -> Iterator[tuple[slice, slice | None]]:
        """Yield, for each frame of the rows [start, end), its rows and the keys that they attend
        to.
        """
        for frame in range(start // self.tokens, -(-end // self.tokens)):
            first = frame * self.tokens
            rows = slice(max(first, start) - start, min(first + self.tokens, end) - start)
            yield rows, slice(first - self.tokens, first) if frame else None


class Rows:
    """The rows of each stream that are computed here: ``local`` (start, size) of its ``all_tokens``
    rows, streams in the plan's order. ``grid``: the shape (L) or (T, H, W) in which the first block
    is given its tokens; empty if they have no batch. ``behind``: called when all rows leave behind
    the last block. ``attending``: the streams of the attention at hand, where the plan alone does
    not tell; ``by_frame``: what it looks at besides.
    """

    def __init__(self, all_tokens: Mapping[str, int], local: Mapping[str, tuple[int, int]]):
        self.all_tokens = all_tokens
        self.local = local
        self.grid = torch.Size()
        self.behind: Callable[[], None] | None = None
        self.attending: tuple[str, ...] = ()
        self.by_frame: KeysByFrame | None = None
        self._memoised: dict[tuple, tuple[Any, Any]] = {}

    def keep_whole(self, stream: str, count: int) -> None:
        """Add a stream all of whose rows are computed here, as on every rank."""
        self.all_tokens = {**self.all_tokens, stream: count}
        self.local = {**self.local, stream: (0, count)}

    def slice(
        self, tensor: torch.Tensor, dim: int, streams: Sequence[str], whole: Sequence[str] | None = None
    ) -> torch.Tensor:
        """Return the local rows of a tensor that holds ``streams`` one after another along ``dim``.
        The tensor has all rows of every stream; if ``whole`` is given, all rows of the streams in
        it and the local rows of the others.
        """
        parts, offset = [], 0
        for stream in streams:
            start, size = self.local[stream]
            is_whole = whole is None or stream in whole
            parts.append(tensor.narrow(dim, offset + (start if is_whole else 0), size))
            offset += self.all_tokens[stream] if is_whole else size
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def localized(
        self, tensor_BLC: torch.Tensor, streams: Sequence[str], whole: Sequence[str] = ()
    ) -> torch.Tensor:
        """Return the local rows of a tensor that has all rows of ``streams``, or that has only
        local rows already. If ``whole`` is given, the tensor has all rows of the streams in it and
        local rows of the others.
        """
        if whole:
            return self.slice(tensor_BLC, 1, streams, whole)
        is_whole = tensor_BLC.shape[1] == sum(self.all_tokens[stream] for stream in streams)
        return self.slice(tensor_BLC, 1, streams) if is_whole else tensor_BLC

    def spread(self, tensor_BlC: torch.Tensor, streams: Sequence[str], whole: Sequence[str]) -> torch.Tensor:
        """Invert ``localized``: return all rows of the streams in ``whole``, with zeros in place of
        all rows that are not local.
        """
        if not set(streams) & set(whole):
            return tensor_BlC
        parts = list(tensor_BlC.split([self.local[stream][1] for stream in streams], dim=1))
        for place, stream in enumerate(streams):
            if stream in whole:
                start, size = self.local[stream]
                parts[place] = torch.nn.functional.pad(
                    parts[place], (0, 0, start, self.all_tokens[stream] - start - size)
                )
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def along(self, tensor: Any, item: Along) -> Any:
        """Return the local rows of an argument that runs along tokens. Raises ModelError if the
        plan does not fit the model.
        """
        if item.within is not None and not isinstance(tensor, torch.Tensor):
            within, rows_alone = item.within, replace(item, within=None)
            return self.memoise(
                tensor, (item.arg,), lambda: within(tensor, lambda rows: self.along(rows, rows_alone))
            )
        if isinstance(tensor, tuple):
            return tuple(self.along(one, item) if isinstance(one, torch.Tensor) else one for one in tensor)
        rows, total = tensor.shape[item.dim], sum(self.all_tokens[stream] for stream in item.streams)
        if rows == 1:
            return tensor
        if rows == total:
            return self.memoise(tensor, (item.dim,), lambda: self.slice(tensor, item.dim, item.streams))
        if item.repeated and rows < total:
            return self.memoise(tensor, (item.dim,), lambda: self._repeated(tensor, item, total))
        raise ModelError(
            f"{item.arg} has {rows} rows for {total} tokens: this model cannot be split by its plan."
        )

    def _repeated(self, tensor: torch.Tensor, item: Along, total: int) -> torch.Tensor:
        rows = tensor.shape[item.dim]
        run = total // rows if total % rows == 0 else total // rows + 1
        source = torch.arange(total, device=tensor.device) // run
        return tensor.index_select(item.dim, self.slice(source, 0, item.streams))

    def cut(self, arguments: dict[str, Any], items: Sequence[Along | Ranges | Boundary]) -> None:
        """Cut the arguments of a block that ``items`` name to the local rows."""
        for item in items:
            if (value := arguments.get(item.arg)) is None:
                continue
            if isinstance(item, Along):
                arguments[item.arg] = self.along(value, item)
            elif isinstance(item, Ranges):
                arguments[item.arg] = self.ranges(value, item)
            else:
                arguments[item.arg] = self.boundary(value, item)

    def ranges(self, ranges: list, item: Ranges) -> list[tuple]:
        """Cut token ranges of whole streams to the local rows. Raises ModelError if the plan
        does not fit the model.
        """
        total = sum(self.all_tokens[stream] for stream in item.streams)
        for begin, end, *rest in ranges:
            require_known_rows(item, (total if end is None else end) - begin, rest)
        if item.after is None:
            return [
                part
                for begin, end, *rest in ranges
                for there, here, start, size in self._places(item.streams)
                for part in clip_ranges(
                    [(begin - there, (total if end is None else end) - there, *rest)],
                    start,
                    size,
                    here,
                    rows_of,
                )
            ]
        start, size = self.local[item.streams[0]]
        shift = self.local[item.after][1]  # what the host added: the local length of the stream before
        stream_ranges = [
            (0 if begin == 0 else begin - shift, end - shift, *rest) for begin, end, *rest in ranges
        ]
        reaches_front = [tuple(rest) for begin, _end, *rest in ranges if begin == 0]
        return [(0, shift, *rest) for rest in reaches_front] + clip_ranges(
            stream_ranges, start, size, offset=shift
        )

    def boundary(self, index: int, item: Boundary) -> int:
        """Return how many of the local rows stand before the boundary."""
        return sum(
            min(max(index - there - start, 0), size) for there, _, start, size in self._places(item.streams)
        )

    def _places(self, streams: Sequence[str]) -> list[tuple[int, int, int, int]]:
        """Return (start among all rows, start among the local rows, first row within the stream,
        size) of the local rows of each stream.
        """
        places, there, here = [], 0, 0
        for stream in streams:
            start, size = self.local[stream]
            places.append((there, here, start, size))
            there, here = there + self.all_tokens[stream], here + size
        return places

    def key_mask(self, rows: torch.Tensor, item: Along, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask over all tokens that stands for ``mask``, which a block made of the local
        ones of ``rows``.
        """

        def make() -> torch.Tensor:
            pieces = [
                rows.new_zeros(1).expand(*rows.shape[: item.dim], count) for count in self.all_tokens.values()
            ]
            given = rows.split([self.all_tokens[stream] for stream in item.streams], item.dim)
            by_stream = {
                **dict(zip(self.all_tokens, pieces, strict=True)),
                **dict(zip(item.streams, given, strict=True)),
            }
            return torch.cat(list(by_stream.values()), -1).to(mask).view(*mask.shape[:-1], -1)

        return self.memoise(rows, ("key mask", mask.shape, mask.dtype), make)

    def among(self, rows: torch.Tensor, stream: str, streams: Sequence[str]) -> torch.Tensor:
        """Return all rows (B, L, C) of ``streams``: the given rows for ``stream``, zeros for the
        others.
        """
        batch, _, channels = rows.shape
        return torch.cat(
            [
                rows if one == stream else rows.new_zeros(batch, self.all_tokens[one], channels)
                for one in streams
            ],
            1,
        )

    def memoise(self, value: Any, key: tuple, make: Callable[[], T]) -> T:
        """Return ``make()``, called once for this very object ``value`` in the evaluation: every
        block is given the same ones.
        """
        full_key = (id(value), *key)
        if full_key not in self._memoised:
            self._memoised[full_key] = (value, make())
        return self._memoised[full_key][1]


class Division:
    """How the ranks of a sequence share the streams out: alike in all evaluations of the same
    tokens. ``local`` (start, size) of the rows of each stream are those of rank ``rank`` of
    ``size``: each stream is split as evenly as it goes, or by the ``weights`` of the ranks.

    ``active``: (start, size) of the rows of each stream that are computed at all, here or on
    another rank; None computes all rows.
    """

    def __init__(
        self,
        all_tokens: Mapping[str, int] | Sequence[tuple[str, int]],
        rank: int,
        size: int,
        active: Mapping[str, tuple[int, int]] | Sequence[tuple[str, tuple[int, int]]] | None = None,
        weights: tuple[float, ...] = (),
    ):
        self.all_tokens = dict(all_tokens)
        self.rank = rank
        self.size = size
        self.weights = weights
        self.active = dict(active or {stream: (0, count) for stream, count in self.all_tokens.items()})
        self.splits = {
            stream: Split.by(weights, count, size, least=1) for stream, (_, count) in self.active.items()
        }
        # Row 0 is an anchor where there are no own rows: host blocks cannot view an empty stream.
        # Anchors never take part in attention or in the result.
        self.local = {
            stream: (self.active[stream][0] + split.starts[rank], split.sizes[rank])
            if split.sizes[rank]
            else (0, min(1, self.all_tokens[stream]))
            for stream, split in self.splits.items()
        }
        self._joint: dict[tuple[str, ...], Joint] = {}

    def joint(self, streams: tuple[str, ...]) -> Joint:
        if streams not in self._joint:
            self._joint[streams] = Joint(self, streams)
        return self._joint[streams]


class Shards(Rows):
    """The rows of this rank in one evaluation whose streams are shared out by ``division``."""

    def __init__(self, division: Division):
        super().__init__(division.all_tokens, division.local)
        self.division = division


class Joint:
    """Streams that attention sees as one sequence. ``counts`` are the active tokens of each rank,
    ``local`` the rows of this one, anchors included.
    """

    def __init__(self, division: Division, streams: tuple[str, ...]):
        self.division = division
        self.streams = streams
        splits = [division.splits[stream] for stream in streams]
        self.counts = [sum(split.sizes[rank] for split in splits) for rank in range(division.size)]
        # (start, size) of each stream's own rows within the local ones
        self._owned: list[tuple[int, int]] = []
        self.local = 0
        self.active_tokens = sum(self.counts)  # computed, over all ranks
        self.all_tokens = sum(division.all_tokens[stream] for stream in streams)
        for stream, split in zip(streams, splits, strict=True):
            self._owned.append((self.local, split.sizes[division.rank]))
            self.local += division.local[stream][1]
        self._has_anchor = self.local != self.counts[division.rank]
        self._ranges: list[tuple[int, int]] | None = None

    def drop_anchors(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Local rows -> the own rows among them."""
        if not self._has_anchor:
            return tensor
        parts = [tensor.narrow(dim, start, size) for start, size in self._owned if size] or [
            tensor.narrow(dim, 0, 0)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def put_back(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Invert ``drop_anchors``, with zeros in anchor rows."""
        if not self._has_anchor:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = self.local
        out = tensor.new_zeros(shape)
        for (start, size), rows in zip(
            self._owned, tensor.split([size for _, size in self._owned], dim), strict=True
        ):
            out.narrow(dim, start, size).copy_(rows)
        return out

    def ranges(self) -> Sequence[tuple[int, int]]:
        """Return (begin, size), in the host's order of all tokens, of each rank's part of each
        stream, in rank-major order.
        """
        if self._ranges is None:
            self._ranges = []
            for rank in range(len(self.counts)):
                offset = 0
                for stream in self.streams:
                    split = self.division.splits[stream]
                    self._ranges.append(
                        (offset + self.division.active[stream][0] + split.starts[rank], split.sizes[rank])
                    )
                    offset += self.division.all_tokens[stream]
        return self._ranges

    def ranges_of(self, ranks: range) -> Sequence[tuple[int, int]]:
        """Return the ranges of these ranks."""
        return self.ranges()[ranks.start * len(self.streams) : ranks.stop * len(self.streams)]

    def rank_major(self) -> torch.Tensor:
        """(active_tokens,): position in rank-major order -> position in the host's order of all
        tokens.
        """
        return places_of(self.ranges())


def require_known_rows(item: Ranges, count: int, rest: Sequence[Any]) -> None:
    """Raises ModelError if a range of ``count`` tokens has rows that the plan does not know."""
    for entry in rest:
        if isinstance(entry, torch.Tensor) and entry.ndim and not (item.rows and len(entry) == count):
            raise ModelError(
                f"{item.arg} has {len(entry)} rows for a range of {count} tokens: this model cannot be split"
                " by its plan."
            )


def rows_of(entry: Any, first: int, last: int) -> Any:
    """Cut an entry of a range to some of its rows. An entry without rows, such as a number, stays
    as it is.
    """
    return entry[first:last] if isinstance(entry, torch.Tensor) and entry.ndim else entry


def places_of(ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the positions in ``ranges``, (begin, size), one after another."""
    return torch.cat([torch.arange(begin, begin + size) for begin, size in ranges])


def permute_mask(mask: torch.Tensor, joint: Joint) -> torch.Tensor:
    """Put a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) in rank-major token order.
    Raises ModelError if it is of another length.
    """
    order, total = to_device(joint.rank_major(), mask.device), joint.active_tokens
    if mask.shape[-1] == total:
        mask = mask.index_select(-1, order)
    elif mask.shape[-1] != 1:
        raise other_length(mask, total)
    if mask.ndim > 1 and mask.shape[-2] == total:
        mask = mask.index_select(-2, order)
    return mask


def other_length(mask: torch.Tensor, total: int) -> ModelError:
    return ModelError(
        f"The attention mask covers {mask.shape[-1]} tokens, the model has {total}: give it one column per"
        " token."
    )


def part_of_mask(
    mask: torch.Tensor, rows: slice, columns: slice, heads: slice, total: int, all_heads: int
) -> torch.Tensor:
    """Cut a rank-major mask to some queries, keys and heads; dimensions of size 1 stay."""
    if mask.shape[-1] == total:
        mask = mask[..., columns]
    if mask.ndim > 1 and mask.shape[-2] == total:
        mask = mask[..., rows, :]
    if mask.ndim == 4 and mask.shape[1] == all_heads > 1:
        mask = mask[:, heads]
    return mask
