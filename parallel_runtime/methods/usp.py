"""Ulysses sequence parallelism (arXiv 2309.14509) through a token plan: exact for any token count, head count and mask.

Every rank runs the blocks on its own rows of every stream. At attention the ranks exchange heads for tokens: each sees all tokens of
its own heads, in rank-major order (rank 0's text and image rows, then rank 1's, ...), so masks are permuted with them.

Legend: B batch, H heads, h heads of one rank, L all tokens, l tokens of one rank, D head dim, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..comm.exchange import Exchange
from ..errors import ModelError
from ..families.plan import Along, Blocks, Ranges, TokenPlan
from ..layout import Split, clip_ranges


class Shards:
    """How one evaluation's streams are split over the ranks, seen from one of them."""

    def __init__(self, streams: Sequence[str], totals: Mapping[str, int], rank: int, size: int):
        self.rank = rank
        self.size = size
        self.splits = {stream: Split.even(totals[stream], size) for stream in streams}
        self.carried = {stream: split.carried(rank) for stream, split in self.splits.items()}
        self._moved: dict[tuple, tuple[Any, torch.Tensor]] = {}
        self._order: torch.Tensor | None = None

    def slice(self, tensor: torch.Tensor, dim: int, streams: Sequence[str]) -> torch.Tensor:
        """This rank's rows of a tensor that holds ``streams`` one after another along ``dim``."""
        parts, offset = [], 0
        for stream in streams:
            start, size = self.carried[stream]
            parts.append(tensor.narrow(dim, offset + start, size))
            offset += self.splits[stream].total
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def owned_rows(self) -> list[tuple[int, int]]:
        """(start, size) of the owned rows of each stream within the carried rows [stream 0 | stream 1 | ...]."""
        rows, offset = [], 0
        for stream, split in self.splits.items():
            rows.append((offset, split.sizes[self.rank]))
            offset += self.carried[stream][1]
        return rows

    @property
    def carries_anchor(self) -> bool:
        return any(self.carried[stream][1] != split.sizes[self.rank] for stream, split in self.splits.items())

    def tokens(self, rank: int) -> int:
        return sum(split.sizes[rank] for split in self.splits.values())

    @property
    def total(self) -> int:
        return sum(split.total for split in self.splits.values())

    def rank_major(self) -> torch.Tensor:
        """(L,): position in rank-major order -> position in the host's order."""
        if self._order is None:
            rows = []
            for rank in range(self.size):
                offset = 0
                for split in self.splits.values():
                    begin = offset + split.starts[rank]
                    rows.append(torch.arange(begin, begin + split.sizes[rank]))
                    offset += split.total
            self._order = torch.cat(rows)
        return self._order

    def once(self, value: Any, key: tuple, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``make()`` for the first block that brings this very object, remembered for the other blocks of the evaluation."""
        full_key = (id(value), *key)
        if full_key not in self._moved:
            self._moved[full_key] = (value, make())
        return self._moved[full_key][1]


def permute_mask(mask: torch.Tensor, shards: Shards, heads: Split) -> torch.Tensor:
    """A host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) for this rank's heads in rank-major token order."""
    order = shards.rank_major().to(mask.device)
    if mask.shape[-1] == shards.total:
        mask = mask.index_select(-1, order)
    elif mask.shape[-1] != 1:
        raise ModelError(f"The attention mask covers {mask.shape[-1]} tokens, the model has {shards.total}: give it one column per token.")
    if mask.ndim > 1 and mask.shape[-2] == shards.total:
        mask = mask.index_select(-2, order)
    if mask.ndim == 4 and mask.shape[1] == heads.total and heads.total > 1:
        mask = mask.narrow(1, heads.starts[shards.rank], heads.sizes[shards.rank])
    return mask


class Ulysses:
    """Attached to one model. Every rank of the exchange's group must run the same evaluations in the same order."""

    def __init__(self, model: nn.Module, plan: TokenPlan, exchange: Exchange, on_block: Callable[[], None] = lambda: None):
        self._plan = plan
        self._exchange = exchange
        self._on_block = on_block
        self._shards: Shards | None = None
        self._totals: dict[str, int] = {}
        self._control: dict[str, list] | None = None
        self._inside_block = False
        self._handles = []
        first = True
        for group in plan.blocks:
            signature = inspect.signature(type(model.get_submodule(group.path)[0]).forward)
            for block in model.get_submodule(group.path):
                enter = self._entering(group, signature, first)
                self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(block.register_forward_hook(self._leaving_block))
                first = False
        leave = model.get_submodule(plan.leave.path)
        self._handles.append(leave.register_forward_pre_hook(self._entering_leave(type(leave)), with_kwargs=True))
        self._handles.append(leave.register_forward_hook(self._gather))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of one evaluation's ``_forward``, ready to be called on this rank."""
        self._exchange.begin()
        self._shards = None
        self._inside_block = False
        control = arguments.get("control")
        self._control = dict(control) if control else None
        options = {**arguments.get("transformer_options", {}), "optimized_attention_override": self._attend}
        return {**arguments, "transformer_options": options, **({"control": self._control} if self._control else {})}

    # -- tokens in ---------------------------------------------------------------------------------------------------

    def _entering(self, group: Blocks, signature: inspect.Signature, first: bool) -> Callable:
        def hook(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(signature, block, args, kwargs)
            if first:
                self._enter(group, arguments)
            self._localize(arguments, group.along, group.ranges)
            self._inside_block = True
            self._on_block()
            if self._exchange.size == 1:
                self._exchange.stop_point()
            return (), arguments

        return hook

    def _enter(self, group: Blocks, arguments: dict[str, Any]) -> None:
        totals = {stream: arguments[arg].shape[1] for arg, (stream,) in group.tokens.items()}
        self._shards = Shards(self._plan.streams, totals, self._exchange.rank, self._exchange.size)
        if self._exchange.size == 1:
            return
        for arg, streams in group.tokens.items():
            arguments[arg] = self._shards.slice(arguments[arg], 1, streams)
        for key, stream in self._plan.control.items() if self._control else ():
            start, size = self._shards.carried[stream]
            if self._control.get(key) is not None:
                self._control[key] = [None if rows is None else rows[:, start : start + size] for rows in self._control[key]]

    def _localize(self, arguments: dict[str, Any], along: Sequence[Along], ranges: Sequence[Ranges]) -> None:
        shards = self._shards
        if shards.size == 1:
            return
        for item in along:
            value = arguments.get(item.arg)
            total = sum(shards.splits[stream].total for stream in item.streams)
            if value is None or value.shape[item.dim] == 1:
                continue
            if value.shape[item.dim] != total:
                raise ModelError(f"{item.arg} has {value.shape[item.dim]} rows for {total} tokens: this model cannot be split by its plan.")
            arguments[item.arg] = shards.once(value, (item.dim,), lambda v=value, i=item: shards.slice(v, i.dim, i.streams))
        for item in ranges:
            if arguments.get(item.arg) is not None:
                arguments[item.arg] = self._local_ranges(arguments[item.arg], item)

    def _local_ranges(self, ranges: list, item: Ranges) -> list[tuple]:
        start, size = self._shards.carried[item.stream]
        if item.after is None:
            return clip_ranges(ranges, start, size)
        shift = self._shards.carried[item.after][1]  # what the host added: the local length of the stream before
        stream_ranges = [(0 if begin == 0 else begin - shift, end - shift, *rest) for begin, end, *rest in ranges]
        local = clip_ranges(stream_ranges, start, size, offset=shift)
        reaches_front = [tuple(rest) for begin, _end, *rest in ranges if begin == 0]
        return [(0, shift, *rest) for rest in reaches_front] + local

    def _leaving_block(self, block: nn.Module, args: tuple, output: Any) -> None:
        self._inside_block = False

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attend(self, attention: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask=None, *args, **kwargs):
        """The host's ``optimized_attention_override``; attention outside the plan's blocks is local and passes through."""
        if self._exchange.size == 1 or not self._inside_block:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        if args:
            kwargs["attn_precision"] = args[0]  # the only other argument hosts pass by position
        skip_reshape, skip_output_reshape = kwargs.pop("skip_reshape", False), kwargs.pop("skip_output_reshape", False)
        q_BHlD, k_BHlD, v_BHlD = (split_heads(t, heads, skip_reshape) for t in (q, k, v))
        if k_BHlD.shape[1] != q_BHlD.shape[1]:  # grouped queries: an uneven split of heads needs them in full
            repeats = q_BHlD.shape[1] // k_BHlD.shape[1]
            k_BHlD, v_BHlD = (t.repeat_interleave(repeats, dim=1) for t in (k_BHlD, v_BHlD))
            kwargs.pop("enable_gqa", None)

        split = Split.even(q_BHlD.shape[1], self._exchange.size)
        qkv_3BhLD = self._tokens_for_heads((q_BHlD, k_BHlD, v_BHlD), split)
        own_heads = split.sizes[self._exchange.rank]
        if own_heads:
            if mask is not None:
                mask = self._shards.once(mask, ("mask",), lambda: permute_mask(mask, self._shards, split))
            out_BhLD = attention(*qkv_3BhLD, own_heads, mask, skip_reshape=True, skip_output_reshape=True, **kwargs)
        else:
            out_BhLD = qkv_3BhLD[0]
        out_BlHD = self._heads_for_tokens(out_BhLD, split)
        return out_BlHD.transpose(1, 2) if skip_output_reshape else out_BlHD.flatten(2)

    def _tokens_for_heads(self, qkv: Sequence[torch.Tensor], heads: Split) -> torch.Tensor:
        """3 x (B, H, l, D) -> (3, B, h, L, D), tokens in rank-major order."""
        shards, me = self._shards, self._exchange.rank
        if shards.carries_anchor:
            rows = shards.owned_rows()
            qkv = [torch.cat([t.narrow(2, start, size) for start, size in rows], 2) for t in qkv]
        batch, _, _, dim = qkv[0].shape
        chunks = [[t.narrow(1, start, size) for t in qkv] for start, size in zip(heads.starts, heads.sizes, strict=True)]
        shapes = [(3, batch, heads.sizes[me], shards.tokens(rank), dim) for rank in range(shards.size)]
        received = self._exchange.all_to_all(chunks, shapes)
        out = qkv[0].new_empty(3, batch, heads.sizes[me], shards.total, dim)
        offset = 0
        for rank in range(shards.size):
            place = out.narrow(3, offset, shards.tokens(rank))
            if rank == me:
                for index, tensor in enumerate(chunks[me]):
                    place[index].copy_(tensor)
            else:
                place.copy_(received[rank])
            offset += shards.tokens(rank)
        return out

    def _heads_for_tokens(self, out_BhLD: torch.Tensor, heads: Split) -> torch.Tensor:
        """(B, h, L, D) in rank-major order -> (B, l, H, D) with zeros in anchor rows."""
        shards, me = self._shards, self._exchange.rank
        batch, _, _, dim = out_BhLD.shape
        tokens = [shards.tokens(rank) for rank in range(shards.size)]
        chunks = [[piece] for piece in out_BhLD.split(tokens, dim=2)]
        shapes = [(batch, heads.sizes[rank], tokens[me], dim) for rank in range(shards.size)]
        received = self._exchange.all_to_all(chunks, shapes)
        out = out_BhLD.new_empty(batch, tokens[me], heads.total, dim)
        for rank in range(shards.size):
            piece = chunks[me][0] if rank == me else received[rank]
            out.narrow(2, heads.starts[rank], heads.sizes[rank]).copy_(piece.transpose(1, 2))
        if not shards.carries_anchor:
            return out
        carried = out.new_zeros(batch, sum(size for _, size in shards.carried.values()), heads.total, dim)
        for (start, size), rows in zip(shards.owned_rows(), out.split([size for _, size in shards.owned_rows()], dim=1), strict=True):
            carried[:, start : start + size] = rows
        return carried

    # -- tokens out --------------------------------------------------------------------------------------------------

    def _entering_leave(self, cls: type) -> Callable:
        signature = inspect.signature(cls.forward)

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = bind(signature, module, args, kwargs)
            self._localize(arguments, (), self._plan.leave.ranges)
            return (), arguments

        return hook

    def _gather(self, module: nn.Module, args: tuple, out_BlC: torch.Tensor) -> torch.Tensor | None:
        """All rows of the leaving stream on rank 0; other ranks return a blank of the same shape."""
        if self._exchange.size == 1:
            return None
        split, me = self._shards.splits[self._plan.leave.stream], self._exchange.rank
        batch, _, channels = out_BlC.shape
        own = out_BlC[:, : split.sizes[me]]
        nothing = own[:, :0]
        chunks = [[own if rank == 0 else nothing] for rank in range(split_count(split))]
        shapes = [(batch, split.sizes[rank] if me == 0 else 0, channels) for rank in range(split_count(split))]
        received = self._exchange.all_to_all(chunks, shapes)
        if me != 0:
            return out_BlC.new_zeros(batch, split.total, channels)
        return torch.cat([own, *(rows.to(own.device) for rows in received[1:])], dim=1)


def split_count(split: Split) -> int:
    return len(split.sizes)


def split_heads(tensor: torch.Tensor, heads: int, already: bool) -> torch.Tensor:
    """(B, l, H*D) -> (B, H, l, D); with ``already`` it is in that form."""
    return tensor if already else tensor.unflatten(2, (heads, -1)).transpose(1, 2)


def bind(signature: inspect.Signature, module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments of a module's forward by name."""
    bound = signature.bind(module, *args, **kwargs).arguments
    bound.pop("self")
    bound.update(bound.pop("kwargs", {}))
    return bound
