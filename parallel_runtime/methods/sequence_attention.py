"""Attention over a sequence that several ranks share (Ulysses, arXiv 2309.14509): the ranks of a
ulysses group exchange heads for tokens, attend, and exchange back.

Legend: B batch, H heads, h heads of one rank, g tokens of one ulysses group, l tokens of one rank,
D head dim, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch

from ..attention.hosts import inexact
from ..attention.kernels import Kernels, Partial, partial_attention
from ..comm.device_copies import to_device
from ..comm.mesh import SequenceComm
from ..comm.parts import TensorRuns, runs_of, to_all
from ..comm.traffic import Flag, Wish
from ..errors import ModelError
from ..families.plan import TokenPlan
from ..layout import Split
from .hooks import Attention, split_heads
from .override import QKV, AttentionCall
from .ring_attention import RingAttention
from .shards import Division, Joint, KeysByFrame, Rows, Shards


def in_order(order: torch.Tensor, *rank_major: torch.Tensor) -> list[torch.Tensor]:
    """(B, h, g, D) each -> the same in the host's order, of which ``order`` has the places."""
    back = to_device(torch.argsort(order), rank_major[0].device)
    return [tensor.index_select(2, back) for tensor in rank_major]


def by_heads(q, k, v, heads: int, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """3 x (B, l, H*D) or, as ``skip_reshape`` says, (B, H, l, D) -> 3 x (B, H, l, D)."""
    skip_reshape = kwargs.pop("skip_reshape", False)
    dim = q.shape[-1] if skip_reshape else q[0, 0].numel() // heads
    q, k, v = (t if skip_reshape else split_heads(t, dim) for t in (q, k, v))
    return q, k, v


class SequenceAttention(ABC):
    """The part of a Sharding that exchanges tokens of a sequence. ``on_progress`` is called before
    every message.
    """

    def __init__(
        self, plan: TokenPlan, comm: SequenceComm, on_progress: Callable[[], None], kernels: Kernels
    ):
        self._divided = lru_cache(maxsize=32)(Division)  # alike in all evaluations of a run, as a rule
        self._kernels = kernels
        self._plan = plan
        self._comm = comm
        self._on_progress = on_progress
        self._ring = RingAttention(comm, on_progress, kernels)

    @abstractmethod
    def over_all_keys(self, call: AttentionCall, qkv: QKV, flag: Flag) -> torch.Tensor:
        """3 x (B, h, g, D) -> (B, h, g, D): attend with the own heads to all keys of the sequence.
        Must decide on ``flag``, the ulysses group's cancel flag.
        """

    def attend(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, **kwargs: Any
    ) -> torch.Tensor:
        """Give each rank its own heads of all tokens of its ulysses group, compute
        ``over_all_keys``, and give the output back.
        """
        if not isinstance(rows, Shards):
            return attention(q, k, v, heads, mask, **kwargs)
        q_BHlD, k_BHlD, v_BHlD = by_heads(q, k, v, heads, kwargs)
        skip_output_reshape = kwargs.pop("skip_output_reshape", False)
        if k_BHlD.shape[1] != q_BHlD.shape[1]:  # grouped queries: an uneven split of heads needs them in full
            repeats = q_BHlD.shape[1] // k_BHlD.shape[1]
            k_BHlD, v_BHlD = (t.repeat_interleave(repeats, dim=1) for t in (k_BHlD, v_BHlD))
            kwargs.pop("enable_gqa", None)
        joint = (
            rows.division.joint(rows.attending)
            if rows.attending
            else self._joint_of(rows.division, q_BHlD.shape[2])
        )
        exchange = self._comm.ulysses
        split, rank = Split.by(self._comm.shares.heads, q_BHlD.shape[1], exchange.size), exchange.rank
        own = slice(split.starts[rank], split.starts[rank] + split.sizes[rank])
        before = None
        if more := k_BHlD.shape[2] - q_BHlD.shape[2]:
            if self._plan.prefix is None:
                raise ModelError(
                    f"{q_BHlD.shape[2]} rows attend to {k_BHlD.shape[2]} others: this model needs another"
                    " plan."
                )
            before = k_BHlD[:, own, :more], v_BHlD[:, own, :more]
            k_BHlD, v_BHlD = (t[:, :, more:] for t in (k_BHlD, v_BHlD))
        qkv_3BhgD, flag = self._heads_for_tokens((q_BHlD, k_BHlD, v_BHlD), split, joint)
        by_frame = None if rows.by_frame is None else self._whole_keys(rows, rows.by_frame, split)
        call = AttentionCall(attention, kwargs, mask, split, own, joint, rows, before, by_frame)
        out_BhgD = self.over_all_keys(call, qkv_3BhgD, flag)
        out_BlHD = self._tokens_for_heads(out_BhgD, split, joint)
        return out_BlHD.transpose(1, 2) if skip_output_reshape else out_BlHD.flatten(2)

    def _whole_keys(self, rows: Shards, local: KeysByFrame, split: Split) -> KeysByFrame:
        """Return the keys and values of all tokens of their stream, of the own heads."""
        joint, ring = rows.division.joint((local.stream,)), self._comm.ring
        kv, flag = self._heads_for_tokens((local.keys, local.values), split, joint)
        kv_2BhKD = kv if isinstance(kv, torch.Tensor) else torch.stack(tuple(kv))
        if ring.size > 1:
            size = self._comm.ulysses.size
            counts = [sum(joint.counts[place * size : (place + 1) * size]) for place in range(ring.size)]
            kv_2BhKD = self._ring.gather(kv_2BhKD, counts, flag)
        return local._replace(keys=kv_2BhKD[0], values=kv_2BhKD[1])

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, **kwargs: Any
    ) -> torch.Tensor:
        """Attend with queries that every rank has whole to keys that are cut: each rank to its own
        keys, and all merge the same parts in the same order.
        """
        if not isinstance(rows, Shards) or self._comm.world.size == 1:
            return attention(q, k, v, heads, mask, **kwargs)
        if mask is not None:
            raise ModelError(
                "Attention over sharded keys has a mask, and no plan says how to cut it: this model needs"
                " another plan."
            )
        joint = rows.division.joint((self._plan.leave.stream,))
        q_BHQD, k_BHlD, v_BHlD = by_heads(q, k, v, heads, kwargs)
        skip_output_reshape = kwargs.pop("skip_output_reshape", False)
        host = inexact(attention, kwargs, False)
        if host and self._comm.ring.size == 1:
            out_BHQD = self._own_heads_over(joint, attention, (q_BHQD, k_BHlD, v_BHlD), kwargs)
            return out_BHQD if skip_output_reshape else out_BHQD.transpose(1, 2).flatten(2)
        k_BHlD, v_BHlD = joint.drop_anchors(k_BHlD, 2), joint.drop_anchors(v_BHlD, 2)
        part = partial_attention(q_BHQD, k_BHlD, v_BHlD, None, kwargs.get("scale"), self._kernels, host)
        own = torch.cat((part.out.float(), part.lse.unsqueeze(-1)), -1)
        parts = own.new_empty(self._comm.world.size, *own.shape)
        self._comm.stop.decide(self._from_all(own, [parts], self._comm.stop.wants_stop))
        whole = reduce(
            self._kernels.merge,
            (
                Partial(part[..., :-1], part[..., -1], float(max(1, count)))
                for part, count in zip(parts, joint.counts, strict=True)
            ),
        )
        out_BHQD = whole.out.to(q.dtype)
        return out_BHQD if skip_output_reshape else out_BHQD.transpose(1, 2).flatten(2)

    def _own_heads_over(
        self, joint: Joint, attention: Attention, qkv: Sequence[torch.Tensor], options: dict[str, Any]
    ) -> torch.Tensor:
        """Likewise (B, H, Q, D), for an attention of which there are no parts to merge: each rank
        with its own heads to all keys.
        """
        q_BHQD, *kv = qkv
        exchange = self._comm.ulysses
        heads = Split.by(self._comm.shares.heads, q_BHQD.shape[1], exchange.size)
        own = q_BHQD.narrow(1, heads.starts[exchange.rank], heads.sizes[exchange.rank])
        (k_BhLD, v_BhLD), flag = self._heads_for_tokens(kv, heads, joint)
        self._comm.stop.decide(flag)
        if own.shape[1]:
            options = {**options, "skip_reshape": True, "skip_output_reshape": True}
            own = attention(own, k_BhLD, v_BhLD, own.shape[1], None, **options)
        out = own.new_empty(own.shape[0], heads.total, *own.shape[2:])
        self._from_all(own, runs_of(out, 1, heads.sizes))
        return out

    def _joint_of(self, division: Division, count: int) -> Joint:
        """Return the streams that attend together, told by how many local rows they have."""
        for streams in (self._plan.streams, *((stream,) for stream in self._plan.also_attend_alone)):
            if division.joint(streams).local == count:
                return division.joint(streams)
        raise ModelError(
            f"Attention over {count} rows fits none of the plan's streams {division.local}: this model"
            " needs another plan."
        )

    def _group_tokens(self, joint: Joint) -> list[int]:
        """Return the active tokens of each rank of this ulysses group."""
        size, index = self._comm.ulysses.size, self._comm.ring.index
        return joint.counts[index * size : (index + 1) * size]

    def _heads_for_tokens(self, qkv: Sequence[torch.Tensor], heads: Split, joint: Joint) -> tuple[QKV, Flag]:
        """3 x (B, H, l, D) -> 3 x (B, h, g, D), tokens in rank-major order; and the ulysses group's
        cancel flag. Or 2 x, without q.
        """
        exchange, wish = self._comm.ulysses, self._comm.stop.wants_stop
        qkv = [joint.drop_anchors(t, 2) for t in qkv]
        if exchange.size == 1:
            return qkv, wish
        batch, _, _, dim = qkv[0].shape
        tokens = self._group_tokens(joint)
        out = qkv[0].new_empty(len(qkv), batch, heads.sizes[exchange.rank], sum(tokens), dim)
        self._on_progress()
        by_heads = [runs_of(t, 1, heads.sizes) for t in qkv]
        return out, exchange.all_to_all(by_heads, runs_of(out, 3, tokens), wish)

    def _tokens_for_heads(self, out_BhgD: torch.Tensor, heads: Split, joint: Joint) -> torch.Tensor:
        """(B, h, g, D) in rank-major order -> (B, l, H, D) with zeros in anchor rows."""
        exchange = self._comm.ulysses
        if exchange.size == 1:
            return joint.put_back(out_BhgD.transpose(1, 2), 1)
        batch, _, _, dim = out_BhgD.shape
        tokens = self._group_tokens(joint)
        out = out_BhgD.new_empty(batch, tokens[exchange.rank], heads.total, dim)
        self._on_progress()
        exchange.all_to_all([runs_of(out_BhgD, 2, tokens)], runs_of(out.transpose(1, 2), 1, heads.sizes))
        return joint.put_back(out, 1)

    def _from_all(self, own: torch.Tensor, into: TensorRuns, wish: Wish | None = None) -> Flag:
        """Send ``own`` to all ranks of the sequence, and receive the part of each rank at its place
        of ``into``. Return the largest cancel flag.
        """
        self._on_progress()
        return self._comm.world.all_to_all([to_all(own, self._comm.world.size)], into, wish)

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        """Return all rows of ``streams``, in the host's order, of which ``local_BlC`` are the local
        ones. Every rank of the sequence must call it.
        """
        assert isinstance(rows, Shards)
        joint = rows.division.joint(streams)
        rows_BgC = own = joint.drop_anchors(local_BlC, 1)
        if self._comm.world.size > 1:
            rows_BgC = own.new_empty(own.shape[0], sum(joint.counts), own.shape[2])
            self._from_all(own, runs_of(rows_BgC, 1, joint.counts))
        whole = own.new_empty(own.shape[0], joint.all_tokens, own.shape[2])
        whole[:, to_device(joint.rank_major(), own.device)] = rows_BgC
        return whole

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor | None:
        """Return the active rows of the leaving stream on the first rank of the sequence; other
        ranks return zeros of that shape. None where this rank has them all already.
        """
        exchange = self._comm.world
        if not isinstance(rows, Shards) or exchange.size == 1:
            return None
        split = rows.division.splits[self._plan.leave.stream]
        batch, _, channels = out_BlC.shape
        own = out_BlC[:, : split.sizes[exchange.rank]]
        nothing = [0] * (exchange.size - 1)
        sizes = split.sizes if exchange.rank == 0 else [0, *nothing]
        whole = out_BlC.new_empty(batch, sum(sizes), channels)
        self._on_progress()
        exchange.all_to_all([runs_of(own, 1, [own.shape[1], *nothing])], runs_of(whole, 1, sizes))
        return whole if exchange.rank == 0 else out_BlC.new_zeros(batch, split.total, channels)
