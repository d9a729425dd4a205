"""One stage of a pipeline over patches: PipeFusion (arXiv 2405.14430, section 3.2) through a token plan.

A stage has its own blocks; in place of the others stand stubs without weights. The stub before the first own block is the door through
which a patch comes in from the stage before, so that what the host's forward does between blocks is done once, on the right rows. Behind
the last own block the forward is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from ..comm.exchange import Stopped
from ..comm.stages import StageLink
from ..families.plan import Blocks, TokenPlan
from ..patches import Patch
from ..stages import Stage
from ..wire.messages import Part
from .patches import PatchForward


class Watch(Protocol):
    """What a stage asks of the rank it is in."""

    def tick(self) -> None: ...
    def wants_stop(self) -> bool: ...
    def next_part(self) -> Part | None:
        """What the next message asks for, if it is here already."""

    def reserve(self, nbytes: int) -> None:
        """Raises Refused where so much is not free."""


class StageLeft(BaseException):
    """This stage's part of the forward is done. Not an Exception: host code catches those."""


class Stub(nn.Module):
    """Stands for another stage's block: takes its arguments, returns the tokens as they are, or what ``door`` makes of them."""

    def __init__(self, stands_for: type[nn.Module], returns: tuple[str, ...]):
        super().__init__()
        self.stands_for = stands_for
        self.returns = returns
        self.door: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None

    def forward(self, **arguments: Any) -> Any:
        tokens = [arguments[name] for name in self.returns]
        if self.door is not None:
            tokens = self.door(tokens)
        return tuple(tokens) if len(tokens) > 1 else tokens[0]


def blocks_of(model: nn.Module, plan: TokenPlan) -> Iterator[tuple[nn.ModuleList, int, Blocks]]:
    """Every block's container, its place there, and its part of the plan."""
    for group in plan.blocks:
        container = model.get_submodule(group.path)
        for place in range(len(container)):
            yield container, place, group


def leave_out(model: nn.Module, plan: TokenPlan, stage: Stage) -> None:
    """Puts stubs in place of the blocks that are not the stage's; their weights are gone."""
    for index, (container, place, group) in enumerate(blocks_of(model, plan)):
        if not stage.owns(index):
            container[place] = Stub(type(container[place]), group.returns)


class StageForward(PatchForward):
    """Attached to a model whose other blocks are left out. Every stage must be given the same patches in the same order."""

    def __init__(
        self,
        model: nn.Module,
        plan: TokenPlan,
        stage: Stage,
        link: StageLink,
        watch: Watch,
    ):
        super().__init__(model, plan, watch.tick, watch.reserve, stage.end - stage.first)
        self._stage = stage
        self._link = link
        self._watch = watch
        self._counts: dict[Part | None, tuple[int, torch.dtype, torch.device]] = {}  # what came in of each part of this run
        self._part: Part | None = None
        self._number = 0
        self._hidden: tuple[int, torch.dtype, torch.device] | None = None  # of the patch that is here
        self._to_send = False
        for index, (container, place, group) in enumerate(blocks_of(model, plan)):
            block = container[place]
            if index == stage.first - 1:
                block.door = self._come_in
            if stage.owns(index):
                self._handles.append(block.register_forward_pre_hook(self._entering_own(group), with_kwargs=True))
            if index == stage.end - 1 and not stage.closes:
                self._handles.append(block.register_forward_hook(lambda _block, _args, out: self._go_out(out)))

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int, part: Part) -> Any:
        """One patch through this stage: the output on the last one, else None. ``number`` is that of the request. A new run is reset.

        Raises Stopped. The next stage gets its message in any case, unless not even the own blocks were reached.
        """
        if self._part is None or part.run != self._part.run:
            self.reset()
            self._counts.clear()
        self._number, self._part, self._hidden, self._to_send = number, part, None, not self._stage.closes
        self._link.begin()
        try:
            return forward(**self.begin_patch(arguments, part.branch, Patch(*part.patch) if part.patch else None))
        except StageLeft:
            return None
        except BaseException:
            if self._to_send and self._hidden is not None:
                count, dtype, device = self._hidden
                self._link.send(number, torch.zeros(count, dtype=dtype, device=device))
            raise

    def _come_in(self, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [t.numel() for t in tokens]
        of = (sum(sizes), tokens[0].dtype, tokens[0].device)
        hidden = self._link.receive(self._number, *of)
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
        def hook(_block: nn.Module, _args: tuple, arguments: dict[str, Any]) -> None:
            if self._hidden is None:
                tokens = [arguments[name] for name in group.tokens]
                self._hidden = (sum(prod(t.shape) for t in tokens), tokens[0].dtype, tokens[0].device)
            if self._watch.wants_stop():
                raise Stopped

        return hook

    def _go_out(self, out: Any) -> None:
        tokens = out if isinstance(out, tuple) else (out,)
        self._link.send(self._number, torch.cat([t.reshape(-1) for t in tokens]))
        self._to_send = False
        raise StageLeft
