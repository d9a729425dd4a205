"""Choose a patch's rows, and let its attention see all other tokens as they were last seen
(PipeFusion, arXiv 2405.14430, section 3.2).

The ranks of one stage share the tokens of a patch. The K/V buffers lie behind their exchange, so
each rank keeps those of its own heads. Around a ring each place keeps a part of the tokens, and
they travel for every attention.

Legend: B batch, H heads, h heads of one rank, L all tokens, g tokens of the patch in one ulysses
group, K those that a place of the ring sends, l tokens of one rank, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import torch

from ...attention.kernels import Kernels
from ...comm.device_copies import to_device
from ...comm.mesh import SequenceComm
from ...comm.traffic import Flag, Stopped
from ...errors import NoRoom
from ...families.plan import TokenPlan
from ...patches import Patch
from ...stages import Stage
from ..method import Rank
from ..sequence_attention import QKV, AttentionCall, SequenceAttention, in_order
from ..shards import Division, Joint, Rows, Shards, other_length, places_of
from .kept_rows import KeptRows, Range, tokens_in
from .kv_buffer import KVBuffers


class PatchSharding(SequenceAttention):
    """Shards the rows of ``patch``, or all rows if it is None. ``layers_alone`` are the stage's
    attentions over streams that also attend alone. ``acts_behind`` names the (path of the
    container, block) behind which the host adds residuals and calls patches of nodes on this stage.
    ``kv``: of the run at hand.
    """

    def __init__(
        self,
        plan: TokenPlan,
        stage: Stage,
        comm: SequenceComm,
        rank: Rank,
        layers_alone: int,
        acts_behind: frozenset[tuple[str, int]],
        kernels: Kernels,
    ):
        super().__init__(plan, comm, rank.tick, kernels)
        self.patch: Patch | None = None
        self._layers = stage.size
        self._layers_alone = layers_alone
        self._acts_behind = acts_behind
        self._rank = rank
        self.kv = KVBuffers()
        self._kept_rows = lru_cache(maxsize=64)(kept_rows)  # alike in all evaluations of a run

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Shards:
        patch, image, world = self.patch, self._plan.leave.stream, self._comm.world
        tokens, active = tuple(all_tokens.items()), None
        if patch is not None:
            own = {stream: (0, count if patch.first else 0) for stream, count in tokens}
            own[image] = (patch.start, all_tokens[image] - patch.start if patch.last else patch.size)
            active = tuple(own.items())
        self._comm.compare(tokens, sum(all_tokens.values()))
        return Shards(self._divided(tokens, world.rank, world.size, active, self._comm.shares.tokens))

    def enter_block(self) -> None:
        self._rank.tick()

    def acts_behind(self, path: str, block: int) -> bool:
        return (path, block) in self._acts_behind

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        assert self.patch is None, "evaluations with such a patch of a node are whole"
        return super().all_rows(rows, local_BlC, streams)

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor:
        """Return all rows of the leaving stream: the patch's own rows, and zeros elsewhere. If the
        model goes on with all rows, the others are their last known version. On ranks other than
        the stage's first, all rows are zero.
        """
        assert isinstance(rows, Shards)
        stream = self._plan.leave.stream
        gathered = super().leave(rows, out_BlC)
        if self._plan.leaves_behind_blocks:
            patch = out_BlC if gathered is None else gathered
            return self.kv.leave(patch, rows.division.active[stream][0], rows.all_tokens[stream])
        batch, _, channels = out_BlC.shape
        whole = out_BlC.new_zeros(batch, rows.all_tokens[stream], channels)
        whole.narrow(1, *rows.division.active[stream]).copy_(out_BlC if gathered is None else gathered)
        return whole

    def over_all_keys(self, call: AttentionCall, qkv: QKV, flag: Flag) -> torch.Tensor:
        """Attend to all keys as they were last seen."""
        if self._comm.ring.size == 1:
            self._comm.stop.decide(flag)
        q_BhgD, *kv = qkv
        layer, place = self.kv.next_layer(), (self._comm.ulysses.size, self._comm.ring.index)
        rows = self._kept_rows(*place, call.joint)
        if layer == 0 and self.kv.is_new:
            own = [call.rows.division.joint((stream,)) for stream in self._plan.also_attend_alone]
            alone = sum(self._kept_rows(*place, joint).tokens for joint in own)
            self._reserve(q_BhgD, self._layers * rows.tokens + self._layers_alone * alone)
        if self._comm.ring.size > 1:
            fresh_2BhgD = qkv[1:] if isinstance(qkv, torch.Tensor) else torch.stack(kv)
            return self._around_the_ring(call, rows, layer, q_BhgD, fresh_2BhgD, flag)
        if not q_BhgD.shape[1]:  # it has no heads of its own
            return q_BhgD
        buffer = self.kv.update(layer, kv, rows.taken[0], rows.tokens)
        mask, order = self._mask_of_own_queries(call), call.host_order
        if order is None:
            return call.compute((q_BhgD, *buffer), mask)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == len(order):
            mask = mask.index_select(-2, to_device(torch.argsort(order), mask.device))
        out = call.compute((*in_order(order, q_BhgD), *buffer), mask)
        return out.index_select(2, to_device(order, out.device))

    def _around_the_ring(
        self,
        call: AttentionCall,
        rows: KeptRows,
        layer: int,
        q_BhgD: torch.Tensor,
        fresh_2BhgD: torch.Tensor,
        flag: Flag,
    ) -> torch.Tensor:
        """Attend to the rows of every place, and keep this place's part of them."""
        own, sizes = self._comm.ring.index, [tokens_in(ranges) for ranges in rows.sent]
        buffer = self.kv.update(layer, fresh_2BhgD, rows.taken[own], rows.tokens)
        stale = [buffer.narrow(3, here, size) for here, _, size in rows.stale]
        sent_2BhKD = torch.cat([*stale, fresh_2BhgD], 3) if stale else fresh_2BhgD
        mask = self._mask_of_own_queries(call)

        def mask_of(mask: torch.Tensor, place: int) -> torch.Tensor:
            return call.rows.memoise(
                mask, ("keys", place), lambda: mask_of_keys(mask, rows.sent[place], call)
            )

        def keep(place: int, kv_2BhKD: torch.Tensor) -> None:
            if place != own:
                fresh = kv_2BhKD.narrow(3, sizes[place] - rows.fresh[place], rows.fresh[place])
                self.kv.update(layer, fresh, rows.taken[place], rows.tokens)

        return self._ring.attend(
            call, q_BhgD, sent_2BhKD, sizes, flag, None if mask is None else partial(mask_of, mask), keep
        )

    def _mask_of_own_queries(self, call: AttentionCall) -> torch.Tensor | None:
        mask, first = call.mask, self._comm.ring.index * self._comm.ulysses.size
        if mask is None:
            return None
        ranks = range(first, first + self._comm.ulysses.size)
        return call.rows.memoise(
            mask, ("queries", call.heads.total), lambda: mask_of_own_queries(mask, call, ranks)
        )

    def _reserve(self, like: torch.Tensor, tokens: int) -> None:
        """Reserve the memory of a branch's K/V buffers before its first attention, of so many
        ``tokens`` together. Raises NoRoom if this rank has not enough for all layers, and Stopped
        if another of the stage has not.
        """
        lack: NoRoom | None = None
        try:
            self._rank.reserve(
                2 * like.shape[0] * like.shape[1] * tokens * like.shape[3] * like.element_size()
            )
        except NoRoom as error:
            lack = error
        if self._comm.any_wishes(lack is not None):
            raise lack or Stopped


def kept_rows(group: int, own: int, joint: Joint) -> KeptRows:
    """Return the rows of these streams that the place ``own`` of the ring, of so many ranks each,
    keeps and sends. It keeps the rows that it computes in a whole evaluation.
    """
    division = joint.division
    whole = Division(division.all_tokens, division.rank, division.size, weights=division.weights)
    every = whole.joint(joint.streams)
    places = [range(first, first + group) for first in range(0, division.size, group)]
    return KeptRows(
        own, [every.ranges_of(ranks) for ranks in places], [joint.ranges_of(ranks) for ranks in places]
    )


def mask_of_own_queries(mask: torch.Tensor, call: AttentionCall, ranks: range) -> torch.Tensor:
    """Return the rows of a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) whose queries
    these ranks compute, for the own heads.
    """
    if mask.ndim > 1 and mask.shape[-2] == call.joint.all_tokens:
        mask = mask.index_select(-2, to_device(places_of(call.joint.ranges_of(ranks)), mask.device))
    if mask.ndim == 4 and mask.shape[1] == call.heads.total > 1:
        mask = mask[:, call.own]
    return mask


def mask_of_keys(mask: torch.Tensor, ranges: Sequence[Range], call: AttentionCall) -> torch.Tensor:
    """Return the columns of such a mask that are of these tokens. Raises ModelError if it is of
    another length.
    """
    if mask.shape[-1] == call.joint.all_tokens:
        return mask.index_select(-1, to_device(places_of(ranges), mask.device))
    if mask.shape[-1] != 1:
        raise other_length(mask, call.joint.all_tokens)
    return mask
