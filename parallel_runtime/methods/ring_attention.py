"""Attention of a rank's queries to keys and values that travel around a ring of ranks; the parts
are merged exactly, by log-sum-exp (Ring Attention, arXiv 2310.01889).

Legend: B batch, h heads of one rank, g queries of one ulysses group, K keys of one place of the
ring, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..attention.hosts import inexact
from ..attention.kernels import Kernels, Partial, partial_attention
from ..comm.mesh import SequenceComm
from ..comm.traffic import Flag
from .override import AttentionCall
from .shards import KeysByFrame

MaskOf = Callable[[int], torch.Tensor]  # a place of the ring -> the mask of the own queries and its keys
Passing = Callable[[int, torch.Tensor], None]  # a place of the ring, its keys and values (2, B, h, K, D)


class RingAttention:
    """Walks the ring for one attention after another. ``on_progress`` is called at every block that
    has come.
    """

    def __init__(self, comm: SequenceComm, on_progress: Callable[[], None], kernels: Kernels):
        self._comm = comm
        self._on_progress = on_progress
        self._kernels = kernels

    def attend(
        self,
        call: AttentionCall,
        q_BhgD: torch.Tensor,
        kv_2BhKD: torch.Tensor,
        keys: Sequence[int],
        flag: Flag,
        mask_of: MaskOf | None,
        passing: Passing = lambda place, kv: None,
    ) -> torch.Tensor:
        """Return (B, h, g, D). ``kv_2BhKD`` is this rank's own block, ``keys`` are those of every
        place. The cancel flags travel with the blocks. ``passing`` is called with each of them.

        If this rank fails, it first passes on the blocks that others wait for, then raises.
        """
        scale, host = call.options.get("scale"), inexact(call.attention, call.options, call.mask is not None)
        partial: Partial | None = None
        failure: Exception | None = None
        walk = self._comm.ring.walk(kv_2BhKD, keys, flag)
        for block in walk:
            self._on_progress()
            if failure is not None:
                continue
            try:
                if partial is None and call.before is not None:
                    partial = partial_attention(q_BhgD, *call.before, None, scale, self._kernels, host)
                if partial is None and call.by_frame is not None:
                    start = sum(keys[: self._comm.ring.index])
                    partial = self._frame_by_frame(call.by_frame, q_BhgD, start, scale, host)
                kv = block.kv.to(q_BhgD.device)
                passing(block.source, kv)
                mask, (k, v) = mask_of(block.source) if mask_of is not None else None, kv
                here = partial_attention(q_BhgD, k, v, mask, scale, self._kernels, host)
                partial = here if partial is None else self._kernels.merge(partial, here)
            except Exception as error:  # noqa: BLE001 raised below
                failure = error
        if failure is not None:
            raise failure
        self._comm.stop.decide(walk.flag)
        assert partial is not None
        return partial.out.to(q_BhgD.dtype)

    def _frame_by_frame(
        self, more: KeysByFrame, q_BhgD: torch.Tensor, start: int, scale: float | None, host: str
    ) -> Partial:
        """Attend to the keys of each query's frame. ``start``: the place of the first query."""
        out = torch.zeros_like(q_BhgD)
        lse = q_BhgD.new_full(q_BhgD.shape[:3], -torch.inf, dtype=torch.float32)
        for rows, keys in more.segments(start, start + q_BhgD.shape[2]):
            if keys is not None:
                k, v = more.keys[:, :, keys], more.values[:, :, keys]
                part = partial_attention(q_BhgD[:, :, rows], k, v, None, scale, self._kernels, host)
                out[:, :, rows], lse[:, :, rows] = part.out, part.lse
        return Partial(out, lse, float(more.tokens))

    def gather(self, kv_2BhKD: torch.Tensor, keys: Sequence[int], flag: Flag) -> torch.Tensor:
        """Return the keys and values of all places of the ring, one after another."""
        starts, shape = [sum(keys[:place]) for place in range(len(keys))], list(kv_2BhKD.shape)
        whole = kv_2BhKD.new_empty(*shape[:3], sum(keys), shape[4])
        for block in self._comm.ring.walk(kv_2BhKD, keys, flag):
            self._on_progress()
            whole.narrow(3, starts[block.source], keys[block.source]).copy_(block.kv)
        return whole
