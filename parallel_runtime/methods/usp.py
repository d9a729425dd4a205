"""Sequence parallelism through a token plan: Ulysses x ring (USP, arXiv 2405.07719), exact for any
token count, head count and mask.

Every rank runs the blocks on its own rows of every stream. At attention, the ranks of a ulysses
group exchange heads for tokens (arXiv 2309.14509), then the keys and values of each group travel
around the ring and partial outputs are merged by log-sum-exp.

Legend: B batch, H heads, h heads of one rank, L all tokens, g tokens of one ulysses group, l tokens
of one rank, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..attention.kernels import Partial, merge, partial_attention
from ..comm.mesh import SequenceComm
from ..errors import ModelError
from ..families.plan import TokenPlan
from ..layout import Split
from .hooks import TokenHooks, split_heads
from .shards import Joint, Shards, part_of_mask, permute_mask


class SequenceParallel(TokenHooks):
    """Attached to one model. All ranks of the sequence must run the same evaluations in the same
    order.

    ``on_progress`` is told of every block and before every message, so that a rank that waits for
    another has come further than that one.
    """

    _rows: Shards | None
    messages_done = "all"  # no message waits for a later evaluation
    block_s: Mapping[int, float] = {}  # blocks are not timed

    def __init__(self, model: nn.Module, plan: TokenPlan, comm: SequenceComm, on_progress: Callable[[], None] = lambda: None):
        super().__init__(model, plan, self._entering_block)
        self._comm = comm
        self._on_progress = on_progress

    def arm(self, part: Any) -> None:
        """An evaluation is asked for: no message has gone through yet."""

    def forget(self) -> None:
        """What is kept of a run is void: here nothing is."""

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._comm.begin()
        return super().begin(arguments)

    def _choose_rows(self, totals: Mapping[str, int]) -> Shards | None:
        return Shards(totals, self._comm.rank, self._comm.size) if self._comm.size > 1 else None

    def _entering_block(self) -> None:
        self._on_progress()
        if self._comm.size == 1:
            self._comm.stop.decide(self._comm.stop.wish(torch.empty(0)))

    # -- attention

    def _attend(self, attention: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask=None, *args, **kwargs):
        """The host's ``optimized_attention_override``; attention outside the plan's blocks is local
        and passes through.
        """
        if self._rows is None or not self._shared_attention:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        if args:
            kwargs["attn_precision"] = args[0]  # the only other argument hosts pass by position
        skip_reshape, skip_output_reshape = kwargs.pop("skip_reshape", False), kwargs.pop("skip_output_reshape", False)
        dim = q.shape[-1] if skip_reshape else q[0, 0].numel() // heads
        q_BHlD, k_BHlD, v_BHlD = (t if skip_reshape else split_heads(t, dim) for t in (q, k, v))
        if k_BHlD.shape[1] != q_BHlD.shape[1]:  # grouped queries: an uneven split of heads needs them in full
            repeats = q_BHlD.shape[1] // k_BHlD.shape[1]
            k_BHlD, v_BHlD = (t.repeat_interleave(repeats, dim=1) for t in (k_BHlD, v_BHlD))
            kwargs.pop("enable_gqa", None)
        joint = self._joint_of(q_BHlD.shape[2])
        split = Split.even(q_BHlD.shape[1], self._comm.ulysses.size)
        qkv_3BhgD, flag = self._heads_for_tokens((q_BHlD, k_BHlD, v_BHlD), split, joint)
        out_BhgD = self._attended(attention, qkv_3BhgD, mask, split, joint, flag, kwargs)
        out_BlHD = self._tokens_for_heads(out_BhgD, split, joint)
        return out_BlHD.transpose(1, 2) if skip_output_reshape else out_BlHD.flatten(2)

    def _attended(self, attention: Callable, qkv, mask, heads: Split, joint: Joint, flag: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """3 x (B, h, g, D) -> (B, h, g, D): the own heads, over all keys that there are."""
        if mask is not None:
            mask = self._rows.once(mask, ("mask",), lambda: permute_mask(mask, joint))
        if self._comm.ring.size > 1:
            qkv = qkv if isinstance(qkv, torch.Tensor) else torch.stack(qkv)
            return self._around_the_ring(qkv, mask, heads, joint, flag, kwargs.get("scale"))
        self._comm.stop.decide(flag)
        return self._at_once(attention, qkv, mask, heads, joint, kwargs)

    def _joint_of(self, rows: int) -> Joint:
        """The streams that attend together, told by how many rows this rank has of them."""
        for streams in (self._plan.streams, *((stream,) for stream in self._plan.also_attend_alone)):
            if self._rows.joint(streams).carried == rows:
                return self._rows.joint(streams)
        raise ModelError(
            f"Attention over {rows} rows fits none of the plan's streams {dict(self._rows.carried)}: this model needs another plan."
        )

    def _group_ranks(self) -> range:
        """Ranks of the sequence that make this rank's ulysses group."""
        size = self._comm.ulysses.size
        return range(self._comm.ring.index * size, (self._comm.ring.index + 1) * size)

    def _heads_for_tokens(
        self, qkv: Sequence[torch.Tensor], heads: Split, joint: Joint
    ) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
        """3 x (B, H, l, D) -> 3 x (B, h, g, D), tokens in rank-major order; and the ulysses group's
        wish to stop.
        """
        exchange = self._comm.ulysses
        qkv = [joint.drop_anchors(t, 2) for t in qkv]
        flag = self._comm.stop.wish(qkv[0])
        if exchange.size == 1:
            return qkv, flag
        batch, _, _, dim = qkv[0].shape
        own_heads = heads.sizes[exchange.rank]
        tokens = [joint.counts[rank] for rank in self._group_ranks()]
        chunks = [[t.narrow(1, start, size) for t in qkv] for start, size in zip(heads.starts, heads.sizes, strict=True)]
        self._on_progress()
        received, flag = exchange.all_to_all(chunks, [(3, batch, own_heads, count, dim) for count in tokens], flag)
        out = qkv[0].new_empty(3, batch, own_heads, sum(tokens), dim)
        for index, (offset, count) in enumerate(zip(accumulate(tokens, initial=0), tokens, strict=False)):
            place = out.narrow(3, offset, count)
            if index == exchange.rank:
                for part, tensor in zip(place, chunks[index], strict=True):
                    part.copy_(tensor)
            else:
                place.copy_(received[index])
        return out, flag

    def _at_once(self, attention: Callable, qkv: torch.Tensor, mask: torch.Tensor | None, heads: Split, joint: Joint, kwargs: dict):
        """(3, B, h, L, D) -> (B, h, L, D) by the host's own attention: one ulysses group has all
        tokens.
        """
        own = heads.sizes[self._comm.ulysses.rank]
        if not own:
            return qkv[0]
        if mask is not None:
            everything = slice(None)
            mask = part_of_mask(mask, everything, everything, self._own_heads(heads), joint.total, heads.total)
        return attention(*qkv, own, mask, skip_reshape=True, skip_output_reshape=True, **kwargs)

    def _own_heads(self, heads: Split) -> slice:
        rank = self._comm.ulysses.rank
        return slice(heads.starts[rank], heads.starts[rank] + heads.sizes[rank])

    def _around_the_ring(self, qkv, mask, heads: Split, joint: Joint, flag: torch.Tensor, scale: float | None) -> torch.Tensor:
        """(3, B, h, g, D) -> (B, h, g, D), attending to every group's keys in turn; the wishes to
        stop travel with them.
        """
        ring, group = self._comm.ring, self._comm.ulysses.size
        keys = [sum(joint.counts[index * group : (index + 1) * group]) for index in range(ring.size)]
        starts = list(accumulate(keys, initial=0))
        rows = slice(starts[ring.index], starts[ring.index + 1])
        partial: Partial | None = None
        flags = []
        for block in ring.walk(qkv[1:], keys, flag):
            self._on_progress()
            part = None
            if mask is not None:
                columns = slice(starts[block.source], starts[block.source + 1])
                part = part_of_mask(mask, rows, columns, self._own_heads(heads), joint.total, heads.total)
            here = partial_attention(qkv[0], *block.kv, part, scale)
            partial = here if partial is None else merge(partial, here)
            flags.append(block.flag)
        self._comm.stop.decide(torch.stack(flags).amax(0))
        return partial.out.to(qkv.dtype)

    def _tokens_for_heads(self, out_BhgD: torch.Tensor, heads: Split, joint: Joint) -> torch.Tensor:
        """(B, h, g, D) in rank-major order -> (B, l, H, D) with zeros in anchor rows."""
        exchange = self._comm.ulysses
        if exchange.size == 1:
            return joint.put_back(out_BhgD.transpose(1, 2), 1)
        batch, _, _, dim = out_BhgD.shape
        tokens = [joint.counts[rank] for rank in self._group_ranks()]
        own_tokens = tokens[exchange.rank]
        chunks = [[piece] for piece in out_BhgD.split(tokens, dim=2)]
        shapes = [(batch, size, own_tokens, dim) for size in heads.sizes]
        self._on_progress()
        received, _ = exchange.all_to_all(chunks, shapes, out_BhgD.new_zeros(1))
        out = out_BhgD.new_empty(batch, own_tokens, heads.total, dim)
        for index, (start, size) in enumerate(zip(heads.starts, heads.sizes, strict=True)):
            piece = chunks[index][0] if index == exchange.rank else received[index]
            out.narrow(2, start, size).copy_(piece.transpose(1, 2))
        return joint.put_back(out, 1)

    # -- tokens out

    def _left(self, out_BlC: torch.Tensor) -> torch.Tensor | None:
        """All rows of the leaving stream on rank 0; other ranks return a blank of the same
        shape.
        """
        exchange = self._comm.world
        if exchange.size == 1:
            return None
        split = self._rows.splits[self._plan.leave.stream]
        batch, _, channels = out_BlC.shape
        own = out_BlC[:, : split.sizes[exchange.rank]]
        chunks = [[own if rank == 0 else own[:, :0]] for rank in range(exchange.size)]
        shapes = [(batch, size if exchange.rank == 0 else 0, channels) for size in split.sizes]
        self._on_progress()
        received, _ = exchange.all_to_all(chunks, shapes, out_BlC.new_zeros(1))
        if exchange.rank != 0:
            return out_BlC.new_zeros(batch, split.total, channels)
        return torch.cat([own, *(rows.to(own.device) for rows in received[1:])], dim=1)
