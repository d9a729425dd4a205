"""Cut a model down to one stage, and hook its ends: hidden rows come in before the first own block
and go out behind the last.

In place of the other stages' blocks stand stubs without weights, so that what the host's forward
does between blocks is done once, on the right rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...comm.mesh import SequenceComm
from ...families.plan import Blocks, TokenPlan
from ...stages import Stage
from ..blocks import blocks_of, taken
from .clock import BlockClock
from .stage_messages import StageMessages


class Stub(nn.Module):
    """Takes the arguments of another stage's block, and returns the tokens as they are, or as
    ``receive`` brings them.
    """

    def __init__(self, stands_for: type[nn.Module], returns: tuple[str, ...]):
        super().__init__()
        self.stands_for = stands_for
        self.returns = returns
        self.receive: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None

    def forward(self, **arguments: Any) -> Any:
        tokens = [taken(arguments, name) for name in self.returns]
        if self.receive is not None:
            tokens = self.receive(tokens)
        return tuple(tokens) if len(tokens) > 1 else tokens[0]


def replace_by_stubs(model: nn.Module, plan: TokenPlan, stage: Stage) -> None:
    """Replace the blocks that are not the stage's by stubs; their weights are freed."""
    for index, (container, place, group) in enumerate(blocks_of(model, plan)):
        if not stage.holds(index) and not isinstance(container[place], Stub):
            container[place] = Stub(type(container[place]), group.returns)


class StageHooks:
    """Hooks on the blocks of one stage. Attach them after TokenHooks, whose hooks on a block must
    come first.

    ``clock``: of the run at hand. ``comm``: if one rank is the whole stage, a cancel is noticed as
    a patch enters. Else its attention exchanges tell it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TokenPlan,
        stage: Stage,
        messages: StageMessages,
        clock: BlockClock,
        comm: SequenceComm,
    ):
        self._model = model
        self._plan = plan
        self._stage = stage
        self._messages = messages
        self.clock = clock
        self._comm = comm
        self._handles: list[Any] = []
        self._receiver: Stub | None = None

    def attach(self) -> None:
        for index, (container, place, group) in enumerate(blocks_of(self._model, self._plan)):
            block = container[place]
            if index == self._stage.first - 1:
                assert isinstance(block, Stub)
                self._receiver, block.receive = block, self._messages.receive_hidden
            if self._stage.holds(index):
                self._attach_own(index, block, group)

    def _attach_own(self, index: int, block: nn.Module, group: Blocks) -> None:
        if index == self._stage.first:
            self._handles.append(block.register_forward_pre_hook(self._entering(group), with_kwargs=True))
        messages = self._messages
        self._handles.append(
            block.register_forward_pre_hook(lambda *_: self.clock.note(index, messages.device))
        )
        # As the block returns it: before TokenHooks give it other rows
        if index == self._stage.end - 1 and not self._stage.is_last:
            self._handles.append(
                block.register_forward_hook(lambda *given: messages.send_hidden(given[-1]), prepend=True)
            )
        self._handles.append(
            block.register_forward_hook(lambda *_: self.clock.note(index, messages.device), prepend=True)
        )

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._receiver is not None:
            self._receiver.receive = None
            self._receiver = None

    def _entering(self, group: Blocks) -> Callable:
        def hook(_block: nn.Module, _args: tuple, arguments: dict[str, Any]) -> None:
            self._messages.device = taken(arguments, group.returns[0]).device
            if self._comm.world.size == 1:
                self._comm.stop.decide(self._comm.stop.wants_stop)

        return hook
