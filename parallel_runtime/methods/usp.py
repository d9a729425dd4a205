"""Sequence parallelism: Ulysses x ring (USP, arXiv 2405.07719), exact for any token count, head
count and mask.

Every rank runs the blocks on its own rows of every stream. At attention, the ranks of a ulysses
group exchange heads for tokens, then the keys and values of each group travel around the ring and
partial outputs are merged by log-sum-exp.

Legend: B batch, l tokens of one rank, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..attention.kernels import TORCHS, Kernels
from ..comm.device_copies import to_device
from ..comm.mesh import SequenceComm
from ..comm.traffic import Flag
from ..families.plan import TokenPlan
from ..layout import Layout
from .blocks import blocks_of
from .fit import require_fit
from .hooks import TokenHooks
from .method import Method
from .sequence_attention import QKV, AttentionCall, SequenceAttention, in_order
from .shards import Shards, part_of_mask, permute_mask

EVERYTHING = slice(None)


class SequenceParallel(Method):
    """The method of a sequence that all ranks share. No evaluation depends on an earlier one: only
    buffers for messages are kept.

    ``on_progress`` is called at every block and before every message. So if one rank waits for
    another, the waiting one has made more progress.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TokenPlan,
        comm: SequenceComm,
        on_progress: Callable[[], None] = lambda: None,
        kernels: Kernels = TORCHS,
    ):
        super().__init__(comm)
        self._hooks = TokenHooks(model, plan, SequenceSharding(plan, comm, on_progress, kernels))
        self.attentions = len(list(blocks_of(model, plan)))

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        require_fit(model, plan)

    def attach(self) -> None:
        self._hooks.attach()

    def detach(self) -> None:
        self._hooks.detach()

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        output = forward(**self._hooks.arguments(arguments))
        self._hooks.patches.entered.require_all(arguments)
        return output

    def forget(self) -> None:
        self._hooks.end_run()


class SequenceSharding(SequenceAttention):
    """Gives each rank of the sequence its share of every stream; attention sees all of them."""

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Shards | None:
        world = self._comm.world
        if world.size == 1:
            return None
        tokens, shares = tuple(all_tokens.items()), self._comm.shares.tokens
        self._comm.compare(tokens, sum(all_tokens.values()))
        return Shards(self._divided(tokens, world.rank, world.size, None, shares))

    def enter_block(self) -> None:
        self._on_progress()
        if self._comm.world.size == 1:
            self._comm.stop.decide(self._comm.stop.wants_stop)

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def over_all_keys(self, call: AttentionCall, qkv: QKV, flag: Flag) -> torch.Tensor:
        host_mask, mask, order = call.mask, None, call.host_order
        if host_mask is not None and (order is None or self._comm.ring.size > 1):
            mask = call.rows.memoise(host_mask, ("mask",), lambda: permute_mask(host_mask, call.joint))
        if self._comm.ring.size > 1:
            return self._around_the_ring(call, qkv, mask, flag)
        self._comm.stop.decide(flag)
        if not qkv[0].shape[1]:  # it has no heads of its own
            return qkv[0]
        if order is not None:
            mask = host_mask
        if mask is not None:
            mask = part_of_mask(
                mask, EVERYTHING, EVERYTHING, call.own, call.joint.active_tokens, call.heads.total
            )
        if order is None:
            return call.compute(qkv, mask)
        out = call.compute(in_order(order, *qkv), mask)
        return out.index_select(2, to_device(order, out.device))

    def _around_the_ring(
        self, call: AttentionCall, qkv: QKV, mask: torch.Tensor | None, flag: Flag
    ) -> torch.Tensor:
        """Attend to every group's keys in turn. ``mask`` is in rank-major order."""
        ring, group, counts = self._comm.ring, self._comm.ulysses.size, call.joint.counts
        keys = [sum(counts[index * group : (index + 1) * group]) for index in range(ring.size)]
        rows = [slice(end - size, end) for end, size in zip(accumulate(keys), keys, strict=True)]

        def mask_of(mask: torch.Tensor, place: int) -> torch.Tensor:
            return part_of_mask(
                mask, rows[ring.index], rows[place], call.own, call.joint.active_tokens, call.heads.total
            )

        qkv = qkv if isinstance(qkv, torch.Tensor) else torch.stack(tuple(qkv))
        return self._ring.attend(
            call, qkv[0], qkv[1:], keys, flag, None if mask is None else partial(mask_of, mask)
        )
