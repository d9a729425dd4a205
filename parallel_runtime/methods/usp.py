"""Sequence parallelism: Ulysses x ring (USP, arXiv 2405.07719), exact for any token count, head
count and mask.

Every rank runs the blocks on its own rows of every stream. At attention, the ranks of a ulysses
group exchange heads for tokens, then the keys and values of each group travel around the ring and
partial outputs are merged by log-sum-exp.

Legend: B batch, h heads of one rank, g tokens of one ulysses group, D head dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..attention.kernels import TORCHS, Kernels, Partial, merge, partial_attention
from ..comm.mesh import SequenceComm
from ..errors import LayoutError
from ..families.plan import TokenPlan
from ..layout import Layout
from ..patches import Part
from .fit import require_fit
from .hooks import Attention, TokenHooks, blocks_of
from .method import Facts, free_frames
from .sequence_attention import QKV, Call, SequenceAttention
from .shards import Rows, Shards, part_of_mask, permute_mask

EVERYTHING = slice(None)


class SequenceParallel:
    """The method of a sequence that all ranks share. No evaluation depends on one before it: only
    buffers for messages are kept.

    ``on_progress`` is called at every block and before every message, so that a rank that waits for
    another has come further than that one.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TokenPlan,
        comm: SequenceComm,
        on_progress: Callable[[], None] = lambda: None,
        kernels: Kernels = TORCHS,
    ):
        self._comm = comm
        self._hooks = TokenHooks(model, plan, SequenceSharding(plan, comm, on_progress, kernels))
        self._part: Part | None = None
        self._attentions = len(list(blocks_of(model, plan)))

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        if layout.pipefusion > 1:
            raise LayoutError(f"{layout.equation()}: sequence parallelism has one stage, set pipefusion to 1.")
        require_fit(model, plan)

    def attach(self) -> None:
        self._hooks.attach()

    def detach(self) -> None:
        self._hooks.detach()

    def begin(self, part: Part) -> None:
        if self._part is None or part.run != self._part.run:
            self.end_run()
        self._part = part
        self._comm.begin(self._attentions, part)

    def evaluate(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        self._comm.begin(self._attentions, self._part)
        try:
            output = forward(**self._hooks.arguments(arguments))
            self._comm.in_step.end()
            return output
        except Exception as error:
            free_frames(error)
            self.fail(number)
            raise

    def fail(self, number: int) -> None:
        self._comm.in_step.fail()

    def end_run(self) -> None:
        self._hooks.end_run()
        self._comm.free_buffers()

    @property
    def facts(self) -> Facts:
        return Facts(messages_done="all" if self._comm.in_step.is_even else "some")


class SequenceSharding:
    """Gives each rank of the sequence its share of every stream; attention sees all of them."""

    def __init__(self, plan: TokenPlan, comm: SequenceComm, on_progress: Callable[[], None], kernels: Kernels):
        self._comm = comm
        self._on_progress = on_progress
        self._kernels = kernels
        self._attention = SequenceAttention(plan, comm, on_progress, kernels)

    def choose_rows(self, all_tokens: Mapping[str, int]) -> Shards | None:
        if self._comm.size == 1:
            return None
        self._comm.in_step.expect(tuple(all_tokens.items()))
        return Shards(all_tokens, self._comm.rank, self._comm.size, weights=self._comm.shares.tokens)

    def enter_block(self) -> None:
        self._on_progress()
        if self._comm.size == 1:
            self._comm.stop.decide(self._comm.stop.wish(torch.empty(0)))

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        assert isinstance(rows, Shards)
        return self._attention.all_rows(rows, local_BlC, streams)

    def attend(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(rows, Shards):
            return attention(q, k, v, heads, mask, *args, **kwargs)
        return self._attention.attend(self._over_all_keys, rows, attention, q, k, v, heads, mask, args, kwargs)

    def attend_over(self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(rows, Shards) or self._comm.size == 1:
            return attention(q, k, v, heads, mask, *args, **kwargs)
        return self._attention.attend_over(rows, q, k, v, heads, mask, kwargs)

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor) -> torch.Tensor | None:
        return self._attention.gather(rows, out_BlC) if isinstance(rows, Shards) else None

    def _over_all_keys(self, call: Call, qkv: QKV, flag: torch.Tensor) -> torch.Tensor:
        host_mask, mask = call.mask, None
        if host_mask is not None:
            mask = call.rows.memoise(host_mask, ("mask",), lambda: permute_mask(host_mask, call.joint))
        if self._comm.ring.size > 1:
            qkv = qkv if isinstance(qkv, torch.Tensor) else torch.stack(tuple(qkv))
            return around_the_ring(self._comm, call, qkv, mask, flag, self._on_progress, self._kernels)
        self._comm.decide(flag)
        if not call.own_heads:
            return qkv[0]
        if mask is not None:
            mask = part_of_mask(mask, EVERYTHING, EVERYTHING, call.own, call.joint.active_tokens, call.heads.total)
        return call.compute(qkv, mask)


def around_the_ring(
    comm: SequenceComm,
    call: Call,
    qkv: torch.Tensor,
    mask: torch.Tensor | None,
    flag: torch.Tensor,
    on_progress: Callable[[], None],
    kernels: Kernels,
) -> torch.Tensor:
    """(3, B, h, g, D) -> (B, h, g, D), attending to every group's keys in turn. The wishes to stop
    travel with them. ``mask`` is in rank-major order.

    Where this rank fails, it passes on what others wait for, then raises.
    """
    ring, group, joint = comm.ring, comm.ulysses.size, call.joint
    keys = [sum(joint.counts[index * group : (index + 1) * group]) for index in range(ring.size)]
    starts = list(accumulate(keys, initial=0))
    rows = slice(starts[ring.index], starts[ring.index + 1])
    scale, host = call.options.get("scale"), getattr(call.attention, "__name__", "")
    partial: Partial | None = None
    failure: Exception | None = None
    flags = []
    for block in ring.walk(qkv[1:], keys, flag):
        on_progress()
        flags.append(block.flag)
        try:
            if partial is None and call.before is not None:
                partial = partial_attention(qkv[0], *call.before, None, scale, kernels, host)
            part = None
            if mask is not None:
                columns = slice(starts[block.source], starts[block.source + 1])
                part = part_of_mask(mask, rows, columns, call.own, joint.active_tokens, call.heads.total)
            k, v = block.kv.to(qkv.device)
            if failure is None:
                here = partial_attention(qkv[0], k, v, part, scale, kernels, host)
                partial = here if partial is None else merge(partial, here)
        except Exception as error:  # noqa: BLE001 raised below
            failure = failure or error
    if failure is not None:
        raise failure
    comm.decide(torch.stack(flags).amax(0))
    assert partial is not None
    return partial.out.to(qkv.dtype)
