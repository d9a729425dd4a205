"""Choose a patch's rows, and let its attention see all other tokens as they were last seen
(PipeFusion, arXiv 2405.14430, section 3.2).

The ranks of one stage share the tokens of a patch. The K/V buffers lie behind their exchange, so
each rank keeps those of its own heads.

Legend: B batch, H heads, h heads of one rank, L all tokens, g tokens of the patch, l tokens of one
rank, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...attention.kernels import Kernels
from ...comm.late import to_device
from ...comm.mesh import SequenceComm
from ...families.plan import TokenPlan
from ...patches import Patch
from ...stages import Stage
from ..hooks import Attention
from ..method import Rank
from ..sequence_attention import QKV, Call, SequenceAttention
from ..shards import Rows, Shards
from .kv_buffer import KVBuffers


class PatchSharding:
    """The rows of ``patch``, or all of them where it is None. ``layers_alone``: the stage's
    attentions over the streams that also attend alone. ``acts_behind``: (path of the container,
    block) behind which the host adds residuals and calls patches of nodes here.
    """

    def __init__(
        self,
        plan: TokenPlan,
        stage: Stage,
        comm: SequenceComm,
        rank: Rank,
        kv: KVBuffers,
        layers_alone: int,
        acts_behind: frozenset[tuple[str, int]],
        kernels: Kernels,
    ):
        self.patch: Patch | None = None
        self._plan = plan
        self._layers = stage.size
        self._layers_alone = layers_alone
        self._acts_behind = acts_behind
        self._comm = comm
        self._rank = rank
        self._kv = kv
        self._attention = SequenceAttention(plan, comm, rank.tick, kernels)

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Shards:
        patch, image = self.patch, self._plan.leave.stream
        active = None
        if patch is not None:
            active = {stream: (0, count if patch.first else 0) for stream, count in all_tokens.items()}
            active[image] = (patch.start, all_tokens[image] - patch.start if patch.last else patch.size)
        self._comm.in_step.expect(tuple(all_tokens.items()))
        return Shards(all_tokens, self._comm.rank, self._comm.size, active, self._comm.shares.tokens)

    def enter_block(self) -> None:
        self._rank.tick()

    def acts_behind(self, path: str, block: int) -> bool:
        return (path, block) in self._acts_behind

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        assert isinstance(rows, Shards) and self.patch is None, "evaluations with such a patch of a node are whole"
        return self._attention.all_rows(rows, local_BlC, streams)

    def attend(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert isinstance(rows, Shards)
        return self._attention.attend(self._over_last_seen, rows, attention, q, k, v, heads, mask, args, kwargs)

    def attend_over(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(rows, Shards) or self._comm.size == 1:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        return self._attention.attend_over(rows, q, k, v, heads, mask, kwargs)

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor:
        """Return the patch's rows of the leaving stream among all its rows, zero elsewhere, or as
        last seen where the model goes on with all of them; on other ranks than the stage's first,
        all zero.
        """
        assert isinstance(rows, Shards)
        stream = self._plan.leave.stream
        gathered = self._attention.gather(rows, out_BlC)
        if self._plan.leaves_behind_blocks:
            patch = out_BlC if gathered is None else gathered
            return self._kv.leave(patch, rows.active[stream][0], rows.all_tokens[stream])
        batch, _, channels = out_BlC.shape
        whole = out_BlC.new_zeros(batch, rows.all_tokens[stream], channels)
        whole.narrow(1, *rows.active[stream]).copy_(out_BlC if gathered is None else gathered)
        return whole

    def _over_last_seen(self, call: Call, qkv: QKV, flag: torch.Tensor) -> torch.Tensor:
        self._comm.decide(flag)
        q_BhgD, *kv = qkv
        layer, tokens = self._kv.next_layer(), call.joint.all_tokens
        if layer == 0 and self._kv.is_new:
            self._reserve(call.rows, q_BhgD, tokens)
        if not call.own_heads:
            return q_BhgD
        buffer = self._kv.update(layer, kv, call.joint.ranges(), tokens)
        host_mask, mask = call.mask, None
        if host_mask is not None:
            mask = call.rows.memoise(host_mask, ("queries", call.own_heads), lambda: mask_of_own_queries(host_mask, call))
        return call.compute((q_BhgD, *buffer), mask)

    def _reserve(self, rows: Shards, like: torch.Tensor, tokens: int) -> None:
        """Reserve the memory of a branch's K/V buffers before its first attention. Raises NoRoom
        where this rank has not enough for all layers.
        """
        alone = self._layers_alone * sum(rows.all_tokens[stream] for stream in self._plan.also_attend_alone)
        kept = self._layers * tokens + alone
        self._rank.reserve(2 * like.shape[0] * like.shape[1] * kept * like.shape[3] * like.element_size())


def mask_of_own_queries(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the rows of a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) whose queries are
    computed here, for the own heads.
    """
    if mask.ndim > 1 and mask.shape[-2] == call.joint.all_tokens:
        mask = mask.index_select(-2, to_device(call.joint.rank_major(), mask.device))
    if mask.ndim == 4 and mask.shape[1] == call.heads.total > 1:
        mask = mask[:, call.own]
    return mask
