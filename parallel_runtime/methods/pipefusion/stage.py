"""One stage of a pipeline over patches: PipeFusion (arXiv 2405.14430, section 3.2) through a token
plan.

A stage has its own blocks; in place of the others stand stubs without weights. The stub before the
first own block is the door through which a patch comes in from the stage before, so that what the
host's forward does between blocks is done once, on the right rows. Behind the last own block the
forward is left.

Legend: B batch, H heads, h heads of one rank, L all tokens, g tokens of the patch, l tokens of one
rank, D head dim, C channels.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ...comm.exchange import Stopped
from ...comm.mesh import SequenceComm
from ...comm.stage_link import StageLink
from ...errors import ModelError, NoRoom
from ...families.plan import Blocks, TokenPlan
from ...layout import Split
from ...patches import Part, Patch
from ...stages import Stage
from ..shards import Joint, Shards
from ..usp import SequenceParallel

CLOCKED = 5  # evaluations of each patch


class Watch(Protocol):
    """What a stage asks of the rank it is in."""

    def tick(self) -> None: ...
    def next_part(self) -> Part | None:
        """What the next message asks for, if it is here already."""

    def reserve(self, nbytes: int) -> None:
        """Raises NoRoom where so much is not free."""


class StageDone(BaseException):
    """This stage's part of the forward is done. Not an Exception: host code catches those."""


class Stub(nn.Module):
    """Stands for another stage's block: takes its arguments, returns the tokens as they are, or
    what ``door`` makes of them.
    """

    def __init__(self, stands_for: type[nn.Module], returns: tuple[str, ...]):
        super().__init__()
        self.stands_for = stands_for
        self.returns = returns
        self.receive: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None

    def forward(self, **arguments: Any) -> Any:
        tokens = [arguments[name] for name in self.returns]
        if self.receive is not None:
            tokens = self.receive(tokens)
        return tuple(tokens) if len(tokens) > 1 else tokens[0]


def blocks_of(model: nn.Module, plan: TokenPlan) -> Iterator[tuple[nn.ModuleList, int, Blocks]]:
    """Every block's container, its place there, and its part of the plan."""
    for group in plan.blocks:
        container = model.get_submodule(group.path)
        for place in range(len(container)):
            yield container, place, group


def has(block: nn.Module, path: str) -> bool:
    return bool(path) and any(name == path for name, _ in block.named_modules())


def leave_out(model: nn.Module, plan: TokenPlan, stage: Stage) -> None:
    """Puts stubs in place of the blocks that are not the stage's; their weights are gone."""
    for index, (container, place, group) in enumerate(blocks_of(model, plan)):
        if not stage.owns(index):
            container[place] = Stub(type(container[place]), group.returns)


class StageForward(SequenceParallel):
    """Attached to a model whose other blocks are left out. Every rank of every stage must be given
    the same patches in the same order.

    The ranks of one stage share the tokens of a patch. The keys and values of all tokens that were
    seen last lie behind their exchange, so each has those of its own heads.
    """

    def __init__(
        self, model: nn.Module, plan: TokenPlan, stage: Stage, comm: SequenceComm, link: StageLink, watch: Watch, clocked: bool = True
    ):
        """``clocked``: whether to take the time of every block."""
        super().__init__(model, plan, comm, watch.tick)
        self._clock_limit = CLOCKED if clocked else 0
        self._stage = stage
        self._link = link
        self._watch = watch
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # (branch, layer) -> (2, B, h, L, D), until the run is forgotten
        self._filled: set[int] = set()  # branches with a whole evaluation in this run
        self._first = False  # whether this is one
        self._clocked: Counter[Part] = Counter()  # how often the blocks' time was taken for each patch of this run
        self._remember_positions(model)
        own = [(container[place], group) for index, (container, place, group) in enumerate(blocks_of(model, plan)) if stage.owns(index)]
        self._second_layers = sum(has(block, group.self_attention_2) for block, group in own)
        added = range(stage.first - 1, stage.end - (not stage.closes))  # what is added behind the last own block, the next stage adds
        self._residuals = {(group.control, place) for index, (_, place, group) in enumerate(blocks_of(model, plan)) if index in added}
        self._layer = 0
        self._counts: dict[Part | None, tuple[int, torch.dtype, torch.device]] = {}  # what came in of each part of this run
        self._number, self._part, self._patch = 0, Part(0, 0), None
        self._hidden: tuple[int, torch.dtype, torch.device] | None = None  # of the patch that is here
        self._to_take, self._to_send, self._armed_for = False, False, 0
        self.block_s: dict[int, float] = {}
        for index, (container, place, group) in enumerate(blocks_of(model, plan)):
            block = container[place]
            if index == stage.first - 1:
                block.receive = self._receive_hidden
            if index == stage.first:
                self._handles.append(block.register_forward_pre_hook(self._entering_own(group), with_kwargs=True))
            if stage.owns(index):
                self._handles.append(block.register_forward_pre_hook(lambda *_, index=index: self._clock(index)))
                self._handles.append(block.register_forward_hook(lambda *_, index=index: self._clock(index)))
            if index == stage.end - 1 and not stage.closes:
                self._handles.append(block.register_forward_hook(lambda _block, _args, out: self._send_hidden(out)))

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int, part: Part) -> Any:
        """One patch through this stage: the output on the last one, else None. ``number`` is that
        of the request. A new run starts empty.

        Raises Stopped. The next stage gets its message in any case, unless not even the own blocks
        were reached.
        """
        if part.run != self._part.run:
            self.forget()
        self._number, self._part, self._patch = number, part, Patch(*part.patch) if part.patch else None
        self._layer, self._hidden = 0, None
        self.block_s = {}
        self._clocked[part] += 1
        self._first = part.branch not in self._filled
        if self._patch is None:
            self._filled.add(part.branch)
        elif self._first:
            raise ModelError("A patch came before the first evaluation of its branch: run again.")
        self._link.begin()
        try:
            return forward(**self.begin(arguments))
        except StageDone:
            return None
        except BaseException:
            if self._to_send and self._hidden is not None:
                count, dtype, device = self._hidden
                self._link.send(number, torch.zeros(count, dtype=dtype, device=device))
                self._to_send = False
            raise

    def arm(self, part: Part | None) -> None:
        """An evaluation is asked for: no message has gone through yet. To be called before all that
        may fail.

        Raises ModelError after a patch of the same run whose messages did not go through: they are
        still in the link.
        """
        if part.run == self._armed_for and (self._to_take or self._to_send):
            raise ModelError("A patch before this one failed on its way through the stages: run again.")
        self._armed_for = part.run
        self._to_take, self._to_send = not self._stage.opens, not self._stage.closes

    def forget(self) -> None:
        """What is kept of a run is void, and its memory free for another's."""
        self._filled.clear()
        self._counts.clear()
        self._clocked.clear()
        self._buffers.clear()
        self._forget_positions()

    @property
    def messages_done(self) -> str:
        """Of the messages of the patch at hand, which have gone through: none, some or all."""
        if not (self._to_take or self._to_send):
            return "all"
        taken, sent = not (self._to_take or self._stage.opens), not (self._to_send or self._stage.closes)
        return "some" if taken or sent else "none"

    # -- from stage to stage

    def _receive_hidden(self, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [t.numel() for t in tokens]
        of = (sum(sizes), tokens[0].dtype, tokens[0].device)
        hidden = self._link.receive(self._number, *of)
        self._to_take = False
        self._counts[self._part] = of
        self._expect_next()
        return [part.view(t.shape) for part, t in zip(hidden.split(sizes), tokens, strict=True)]

    def _expect_next(self) -> None:
        """Lets the next patch come in while this one is computed."""
        coming = self._counts.get(self._watch.next_part())
        if coming is not None:
            count, dtype, device = coming
            self._link.expect(count + 1, dtype, device)

    def _entering_own(self, group: Blocks) -> Callable:
        """A stage of one rank leaves here what was cancelled: attention tells it late on CUDA, and
        many patches may be on their way.
        """

        def hook(_block: nn.Module, _args: tuple, arguments: dict[str, Any]) -> None:
            tokens = [arguments[name] for name in group.tokens]
            self._hidden = (sum(t.numel() for t in tokens), tokens[0].dtype, tokens[0].device)
            if self._comm.size == 1:
                self._comm.stop.decide(self._comm.stop.wish(torch.empty(0)))

        return hook

    def _send_hidden(self, out: Any) -> None:
        tokens = out if isinstance(out, tuple) else (out,)
        self._link.send(self._number, torch.cat([t.reshape(-1) for t in tokens]))
        self._to_send = False
        raise StageDone

    def _entering_block(self) -> None:
        self._on_progress()

    def _clock(self, block: int) -> None:
        """Called before and after an own block. Of the first few evaluations: on CUDA it waits for
        what was computed, not for messages.
        """
        if self._patch is not None and self._clocked[self._part] <= self._clock_limit:
            if self._hidden is not None and self._hidden[2].type == "cuda":
                torch.cuda.current_stream().synchronize()
            now = time.perf_counter()
            self.block_s[block] = now - self.block_s[block] if block in self.block_s else now

    def _adds(self, key: str, behind: int) -> bool:
        return (key, behind) in self._residuals

    # -- the rows of a patch

    def _choose_rows(self, totals: Mapping[str, int]) -> Shards:
        patch, image = self._patch, self._plan.leave.stream
        parts = None
        if patch is not None:
            parts = {stream: (0, total if patch.first else 0) for stream, total in totals.items()}
            parts[image] = (patch.start, totals[image] - patch.start if patch.last else patch.size)
        return Shards(totals, self._comm.rank, self._comm.size, parts)

    def _attended(self, attention: Callable, qkv, mask, heads: Split, joint: Joint, flag: torch.Tensor, kwargs: dict) -> torch.Tensor:
        self._comm.stop.decide(flag)
        q_BhgD, *kv = qkv
        own = heads.sizes[self._comm.ulysses.rank]
        layer, self._layer = self._layer, self._layer + 1
        if layer == 0 and self._first:
            self._reserve(q_BhgD, joint.whole)
        if not own:
            return q_BhgD
        buffer = self._buffer(layer, q_BhgD, joint.whole)
        at = 0
        for begin, size in joint.ranges():
            for place, new in zip(buffer, kv, strict=True):
                place.narrow(2, begin, size).copy_(new.narrow(2, at, size))
            at += size
        if mask is not None:
            mask = self._rows.once(mask, ("queries", own), lambda: self._own_queries(mask, heads, joint))
        return attention(q_BhgD, *buffer, own, mask, skip_reshape=True, skip_output_reshape=True, **kwargs)

    def _buffer(self, layer: int, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """(2, B, h, L, D): this layer's keys and values of this branch, as they were last seen."""
        shape = (2, *like.shape[:2], tokens, like.shape[3])
        buffer = self._buffers.get((self._part.branch, layer))
        if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype:
            if self._patch is not None:
                raise ModelError(f"A patch attends over {tokens} tokens, which its first evaluation did not: set pipefusion to 1.")
            buffer = self._buffers[self._part.branch, layer] = like.new_empty(shape)
        return buffer

    def _reserve(self, like: torch.Tensor, tokens: int) -> None:
        """Before a branch's first attention; all ranks of the stage must call it.

        Raises NoRoom where this rank has none for the keys and values of all layers, Stopped where
        another one has none.
        """
        alone = self._second_layers * sum(self._rows.totals[stream] for stream in self._plan.also_attend_alone)
        rows = self._stage.size * tokens + alone
        refusal = None
        try:
            self._watch.reserve(2 * like.shape[0] * like.shape[1] * rows * like.shape[3] * like.element_size())
        except NoRoom as error:
            refusal = error
        group, nothing = self._comm.ulysses, like.new_empty(0)
        if group.size > 1:
            _, flag = group.all_to_all([[nothing]] * group.size, [(0,)] * group.size, like.new_full((1,), float(refusal is not None)))
            if refusal is None and bool(flag):
                raise Stopped
        if refusal is not None:
            raise refusal

    def _own_queries(self, mask: torch.Tensor, heads: Split, joint: Joint) -> torch.Tensor:
        """The rows of a host mask ((L, L), (B, L, L), (B, 1 or H, 1 or L, L)) whose queries are
        here, for the own heads.
        """
        if mask.ndim > 1 and mask.shape[-2] == joint.whole:
            mask = mask.index_select(-2, joint.rank_major().to(mask.device))
        if mask.ndim == 4 and mask.shape[1] == heads.total > 1:
            mask = mask[:, self._own_heads(heads)]
        return mask

    def _left(self, out_BlC: torch.Tensor) -> torch.Tensor:
        """The patch's rows of the leaving stream among all its rows, zero elsewhere; on other ranks
        than the stage's first, all zero.
        """
        stream = self._plan.leave.stream
        gathered = super()._left(out_BlC)
        batch, _, channels = out_BlC.shape
        whole = out_BlC.new_zeros(batch, self._rows.totals[stream], channels)
        whole.narrow(1, *self._rows.parts[stream]).copy_(out_BlC if gathered is None else gathered)
        return whole
