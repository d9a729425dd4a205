"""Note what a forward computes: up to each block, and on which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

from ..families.plan import Blocks, Insert
from ..families.sample import TokenParts
from ..methods.blocks import taken
from ..methods.hooks import Attention, binder
from ..methods.inserts import frame_tokens
from ..methods.shards import Rows
from ..weights.shared_layers import Layer
from .dry_device import Counts
from .figures import Apart, Attended, FrameTokens

# In the place of rows: what ranks share, whatever its rows, as ``Apart`` has it
SHARED, FRAMED, BEHIND, FRAMED_BEHIND = -1, -2, -3, -4

Mark = Counter[int]  # the FLOPs up to a place of a forward, by the rows that they are on


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
    """Notes in which ``turns`` layers compute. A layer's weights are still there where it, or it
    and one other, compute several times (``turns.Room``).
    """

    def __init__(self) -> None:
        self.turns: list[Layer] = []
        self._held: list[Layer] = []  # the one at hand last

    def note(self, layer: Layer) -> Callable[..., None]:
        """Return a hook on a layer."""

        def enter(*_: Any) -> None:
            if layer not in self._held:
                self.turns.append(layer)
            self._held = [*[one for one in self._held if one is not layer][-1:], layer]

        return enter


class Recorder:
    """A Sharding that computes everything and notes the plan's blocks and the attentions in each.
    ``marks``: what was computed at each block's beginning; ``left``: and where the tokens leave.
    ``hidden``: how wide tokens enter the blocks. ``order``: of the layers that ranks can share out.
    ``frames``: those that modules are given whole.
    """

    def __init__(self, figures: Counts, attention: Attention | None = None):
        self._instead = attention
        self.marks: list[Mark] = []
        self.left: Mark | None = None
        self.hidden = 0
        self.order = LayerOrder()
        self.frames: FrameTokens | None = None
        self._before: Mark = Counter()
        self.attended: list[list[Attended]] = []
        self.tokens: Mapping[str, int] = {}
        self._figures = figures

    def note_width(self, group: Blocks) -> Callable[..., None]:
        """Return a hook on the first block, behind the one that names its arguments."""

        def note(_block: Any, _args: tuple, arguments: dict[str, Any]) -> None:
            self.hidden = taken(arguments, next(iter(group.tokens))).shape[-1]

        return note

    def enter_insert(self, module: nn.Module, insert: Insert) -> Callable[..., None]:
        """Return a hook on a module that tokens, or their frames, are cut for."""
        bind = binder(module)

        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._before = self._figures.by_rows.copy()
            if insert.frames is not None:
                self.frames = FrameTokens(*frame_tokens(insert.frames, self.tokens, bind(args, kwargs)))

        return enter

    def leave_insert(self, kind: int) -> Callable[..., None]:
        """Return a hook behind such a module."""

        def leave(*_: Any) -> None:
            self._before[kind] += self._figures.flops - self._before.total()
            self._figures.by_rows = self._before

        return leave

    def choose_rows(self, all_tokens: Mapping[str, int]) -> None:
        self.tokens = dict(all_tokens)

    def enter_block(self) -> None:
        self.marks.append(self._figures.by_rows.copy())
        self.attended.append([])

    def acts_behind(self, path: str, block: int) -> bool:
        return True

    def all_rows(self, rows: Rows, local_BlC: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        return local_BlC

    def attend(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        skips = kwargs.get("skip_reshape", False)
        self.attended[-1].append(
            Attended(q.shape[2 if skips else 1], heads, q.shape[-1] if skips else q[0, 0].numel() // heads)
        )
        return (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)

    def attend_over(
        self, rows: Rows | None, attention: Attention, q, k, v, heads: int, mask, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """What travels of it is as small as the whole queries, and counts as gathered. Its FLOPs
        are shared by the keys.
        """
        self._before = self._figures.by_rows.copy()
        out = (self._instead or attention)(q, k, v, heads, mask, *args, **kwargs)
        self.leave_insert(SHARED)()
        return out

    def leave(self, rows: Rows | None, out_BlC: torch.Tensor | None) -> None:
        self.left = self._figures.by_rows.copy()
