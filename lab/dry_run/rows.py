"""Count which FLOPs of a forward ranks share by its rows, and which every rank computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from ...parallel_runtime.families.plan import Insert, TokenPlan
from ...parallel_runtime.families.sample import TokenParts
from ...parallel_runtime.forward import binder
from ...parallel_runtime.methods.hooks import Attention
from ...parallel_runtime.methods.inserts import frame_tokens, inserts_of, modules_at
from ...parallel_runtime.methods.shards import Rows
from ...parallel_runtime.planner.dry_run import Recorder, run_recorded
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.fake_mode import QuickFakeMode
from ...parallel_runtime.weights.shared_layers import Layer, gathered_together, shared_layers
from .device import WatchedDevice

# In the place of rows: what ranks share, whatever its rows, as ``Apart`` has it
SHARED, FRAMED, BEHIND, FRAMED_BEHIND = -1, -2, -3, -4

Mark = Counter[int]  # the FLOPs up to a place of a forward, by the rows that they are on


class FrameTokens(NamedTuple):
    """``each`` frame has so many tokens, which are the first ``total`` of their stream."""

    each: int
    total: int


class Apart(NamedTuple):
    """FLOPs of a block that ranks share otherwise than by its rows: ``alone`` on rows of no shared
    token, such as a text's that tokens attend to, of which every rank computes all; ``framed`` in
    modules that are given whole frames. ``behind`` it, and ``framed_behind``: in modules that a
    stage runs behind the blocks of those before it too, but not behind its own last one.
    """

    alone: int = 0
    framed: int = 0
    behind: int = 0
    framed_behind: int = 0


class Unshared(NamedTuple):
    """What ranks do not share by rows. ``blocks``: of each block; ``closing``: FLOPs behind all of
    them; ``frames``: those that modules are given whole.
    """

    blocks: Sequence[Apart] = ()
    closing: int = 0
    frames: FrameTokens | None = None


@dataclass(frozen=True, kw_only=True)
class WholeByRows(Whole):
    """``more_turns``: bytes of shared weights gathered beyond each layer once, because some layers
    compute several times; below zero where others never do.
    """

    unshared: Unshared
    more_turns: int = 0


def count_by_rows(
    model: Any, plan: TokenPlan, arguments: dict[str, Any], mode: QuickFakeMode, cut: TokenParts
) -> WholeByRows:
    """Count one evaluation of ``model``, a BaseModel. ``cut``: how its layers cut tokens."""
    counts = WatchedDevice()
    counts.chosen = 1 / cut.experts
    recorder = RowRecorder(counts)
    run_recorded(model, plan, arguments, mode, recorder)
    whole = recorder.whole(model, plan)
    own = OwnRows(recorder.tokens, recorder.told[plan.prefix.stream] if plan.prefix else 0, cut)
    marks = [*recorder.marks, recorder.left or counts.by_rows]
    return WholeByRows(
        **vars(whole),
        unshared=Unshared(
            [own.apart(*pair) for pair in pairwise(marks)], counts.flops - marks[-1].total(), recorder.frames
        ),
        more_turns=sum(layer.nbytes for block in recorder.order.turns for layer in block)
        - sum(map(sum, whole.shareable.layers)),
    )


class OwnRows:
    """Tells the rows that ranks share from those that every rank has: ``tokens`` of each stream,
    alone or joined, and what layers ``cut`` of those. ``prefix`` tokens before them are every
    rank's.
    """

    def __init__(self, tokens: Mapping[str, int], prefix: int, cut: TokenParts):
        counts = list(tokens.values())
        joined = {sum(some) for size in range(1, len(counts) + 1) for some in combinations(counts, size)}
        each = {(count, -(-count // parts)) for count in joined for parts in cut.chunks}
        in_chunks = {size for _, size in each} | {count % size or size for count, size in each}
        self._shared = (
            {SHARED, FRAMED, BEHIND, FRAMED_BEHIND}
            | joined
            | {count * cut.chosen // cut.experts for count in joined}
            | in_chunks
        )
        self._prefix = prefix

    def apart(self, before: Mark, after: Mark) -> Apart:
        """Return the FLOPs between two places that are not shared by rows."""
        alone = round(sum(self._part(rows) * (flops - before[rows]) for rows, flops in after.items()))
        return Apart(alone, *(after[kind] - before[kind] for kind in (FRAMED, BEHIND, FRAMED_BEHIND)))

    def _part(self, rows: int) -> float:
        if rows in self._shared:
            return 0.0
        return self._prefix / rows if rows > self._prefix and rows - self._prefix in self._shared else 1.0


class LayerOrder:
    """Notes in which ``turns`` blocks of layers compute. A block's weights are still there where
    it, or it and one other, compute several times (``turns.Room``).
    """

    def __init__(self) -> None:
        self.turns: list[list[Layer]] = []
        self._held: list[list[Layer]] = []  # the one at hand last

    def note(self, block: list[Layer]) -> Callable[..., None]:
        """Return a hook on a layer of a block."""

        def enter(*_: Any) -> None:
            if block not in self._held:
                self.turns.append(block)
            self._held = [*[one for one in self._held if one is not block][-1:], block]

        return enter


class RowRecorder(Recorder):
    """Notes the rows too. ``marks``: what was computed at each block's beginning; ``left``: and
    where the tokens leave. ``order``: of the layers that ranks can share out. ``frames``: those
    that modules are given whole.
    """

    counts: WatchedDevice

    def __init__(self, counts: WatchedDevice, attention: Attention | None = None):
        super().__init__(counts, attention)
        self.marks: list[Mark] = []
        self.left: Mark | None = None
        self.order = LayerOrder()
        self.frames: FrameTokens | None = None
        self._before: Mark = Counter()

    def hooks(self, transformer: nn.Module, plan: TokenPlan) -> list[Any]:
        handles = super().hooks(transformer, plan)
        for insert in inserts_of(plan):
            is_within = insert.path.startswith(tuple(f"{group.path}." for group in plan.blocks))
            kind = (
                (SHARED if is_within else BEHIND)
                if insert.frames is None
                else (FRAMED if is_within else FRAMED_BEHIND)
            )
            for module in modules_at(transformer, insert.path):
                enter, leave = self._enter_insert(module, insert), self._leave_insert(kind)
                handles += [
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(leave),
                ]
        return handles + [
            layer.module.register_forward_pre_hook(self.order.note(block))
            for block in gathered_together(shared_layers(transformer))
            for layer in block
        ]

    def _enter_insert(self, module: nn.Module, insert: Insert) -> Callable[..., None]:
        """Return a hook on a module that tokens, or their frames, are cut for."""
        bind = binder(type(module).forward)

        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._before = self.counts.by_rows.copy()
            if insert.frames is not None:
                self.frames = FrameTokens(*frame_tokens(insert.frames, self.tokens, bind(args, kwargs)))

        return enter

    def _leave_insert(self, kind: int) -> Callable[..., None]:
        """Return a hook behind such a module."""

        def leave(*_: Any) -> None:
            self._before[kind] += self.counts.flops - self._before.total()
            self.counts.by_rows = self._before

        return leave

    def enter_block(self) -> None:
        super().enter_block()
        self.marks.append(self.counts.by_rows.copy())

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """What travels of it is as small as the whole queries, and counts as gathered. Its FLOPs
        are shared by the keys.
        """
        self._before = self.counts.by_rows.copy()
        out = super().attend_over(rows, attention, q, k, v, heads, mask, *args, **kwargs)
        self._leave_insert(SHARED)()
        return out

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor | None) -> None:
        super().leave(rows, out_BlC)
        self.left = self.counts.by_rows.copy()
