"""PipeFusion (arXiv 2405.14430, section 3.2): one stage of a pipeline over patches of the image.

A patch comes in from the stage before, runs through the own blocks, and goes on to the next stage.
Its attention sees all tokens, those of other patches as they were last seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ...attention.kernels import TORCHS, Kernels
from ...comm.mesh import SequenceComm
from ...comm.stage_link import StageLink
from ...comm.traffic import Stopped, Unlike
from ...errors import NoRoom, Refused
from ...families.plan import TokenPlan
from ...layout import Layout
from ...patches import Patch
from ...stages import Stage, require_blocks
from ..blocks import blocks_of
from ..fit import require_fit
from ..hooks import TokenHooks
from ..method import Method, Rank, free_frames
from .clock import BlockClock, block_seconds
from .kv_buffer import KVBuffers
from .patch_sharding import PatchSharding
from .stage_hooks import StageHooks, replace_by_stubs
from .stage_messages import StageDone, StageMessages


class PipeFusion(Method):
    """The method of a pipeline of stages. Making it cuts the model down to ``stage``, for good.

    Every rank of every stage must be given the same parts in the same order. ``clocked``: whether
    to time the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TokenPlan,
        stage: Stage,
        comm: SequenceComm,
        link: StageLink,
        rank: Rank,
        clocked: bool = True,
        kernels: Kernels = TORCHS,
    ):
        replace_by_stubs(model, plan, stage)
        blocks = [
            (index, container[place], place, group)
            for index, (container, place, group) in enumerate(blocks_of(model, plan))
        ]
        alone = sum(
            has(block, group.self_attention_2) for index, block, _, group in blocks if stage.holds(index)
        )
        # What is done behind the last own block, the next stage does
        acts = range(stage.first - 1, stage.end - (not stage.is_last))
        acts_behind = frozenset((group.path, place) for index, _, place, group in blocks if index in acts)
        super().__init__(comm)
        self.attentions = stage.size + alone
        self._clocked = clocked
        self._messages = StageMessages(stage, link, rank.next_part)
        self._sharding = PatchSharding(plan, stage, comm, rank, alone, acts_behind, kernels)
        self._hooks = TokenHooks(model, plan, self._sharding)
        self._stage_hooks = StageHooks(model, plan, stage, self._messages, BlockClock(clocked), comm)

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        require_fit(model, plan)
        plan.require_stages(type(model))
        require_blocks(layout.stages, len(list(blocks_of(model, plan))))

    def attach(self) -> None:
        for hooks in (self._hooks, self._stage_hooks):
            hooks.attach()

    def detach(self) -> None:
        for hooks in (self._hooks, self._stage_hooks):
            hooks.detach()

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Run the part through this stage: the output on the last one, else None. Raises ModelError
        after a patch of the same run whose messages are still in the link.
        """
        part = self.part
        self._messages.begin(part, number)
        try:
            times = self._stage_hooks.clock.start(part)
            self.block_s = partial(block_seconds, times)
            self._sharding.kv.start(part)
            self._sharding.patch = Patch(*part.patch) if part.patch else None
            try:
                output = forward(**self._hooks.arguments(arguments))
                self._messages.check()
            except StageDone:
                output = None
            if self._messages.left.any:
                raise Refused(
                    "This model's forward left out a block at which a stage of the pipeline receives or"
                    " sends: set pipefusion to 1."
                )
            self._hooks.patches.entered.require_all(arguments)
            return output
        except Stopped:
            self._messages.go_through()
            raise
        except (Exception, Unlike) as error:
            # Those that leave the whole stage: else its other ranks wait for this one
            if self._comm.world.size == 1 or isinstance(error, (NoRoom, Unlike)):
                free_frames(error)
                self._go_through()
            raise

    def _go_through(self) -> None:
        """Receive and send all messages that other stages still expect: none is left of the patch
        then.
        """
        try:
            self._messages.go_through()
        except Exception:  # noqa: BLE001 the failure that came first is told
            return
        self._comm.traffic.is_complete = not self._messages.left.any

    def forget(self) -> None:
        self._hooks.end_run()
        self._sharding.kv = KVBuffers()
        self._stage_hooks.clock = BlockClock(self._clocked)
        self._messages.end_run()

    @property
    def kept_bytes(self) -> int:
        return self._sharding.kv.nbytes()


def has(block: nn.Module, path: str) -> bool:
    return bool(path) and any(name == path for name, _ in block.named_modules())
