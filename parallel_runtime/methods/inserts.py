"""Hook the modules that a model runs between its blocks, or within them, on tokens that are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ModelError
from ..families.plan import Frames, Insert, TokenPlan
from .shards import Rows


class Inserted:
    """The hooks of one module: ``enter`` before its forward and ``leave`` behind it.

    ``bind``: (args, kwargs) -> all arguments by name. ``rows``: the local rows of the evaluation at
    hand, None while it has all of them.
    """

    def __init__(
        self, insert: Insert, bind: Callable[[tuple, dict], dict[str, Any]], rows: Callable[[], Rows | None]
    ):
        self._insert = insert
        self._bind = bind
        self._rows = rows
        self._span: FrameSpan | None = None  # of the tokens that the module was given

    def enter(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        rows, self._span = self._rows(), None
        if rows is None:
            return None
        arguments = self._bind(args, kwargs)
        for item in self._insert.along:
            arguments[item.arg] = rows.along(arguments[item.arg], item)
        if self._insert.frames is not None:
            start, size = rows.local[self._insert.frames.stream]
            each_and_all = frame_tokens(self._insert.frames, rows.all_tokens, arguments)
            self._span = FrameSpan.over(start, start + size, *each_and_all)
            self._span.widen(self._insert.frames, arguments)
        return (), arguments

    def leave(self, _module: nn.Module, _args: Any, out_BLC: torch.Tensor) -> torch.Tensor | None:
        return None if self._span is None else self._span.narrow(out_BLC)


class FrameSpan(NamedTuple):
    """The frames ``first`` to ``end`` that local tokens are of. Of ``inside`` local tokens they
    have ``before`` and ``behind`` others. Where no local token is of a frame it is one frame of
    others: host modules cannot view an empty one.
    """

    first: int
    end: int
    before: int
    inside: int
    behind: int

    @classmethod
    def over(cls, start: int, end: int, tokens: int, whole: int) -> FrameSpan:
        """Return the span of local tokens [start, end). Frames have ``tokens`` each, ``whole`` in
        all.
        """
        end = min(end, whole)
        if start >= end:
            return cls(0, 1, tokens, 0, 0)
        first, last = start // tokens, -(-end // tokens)
        return cls(first, last, start - first * tokens, end - start, last * tokens - end)

    def widen(self, frames: Frames, arguments: dict[str, Any]) -> None:
        """Give the module all of these frames, with zeros for the tokens of others, and nothing of
        any other frame.
        """
        local_BlC = arguments[frames.tokens]
        batch, _, channels = local_BlC.shape
        before, behind = (local_BlC.new_zeros(batch, count, channels) for count in (self.before, self.behind))
        arguments[frames.tokens] = torch.cat(
            [before, local_BlC[:, : self.inside], behind, local_BlC[:, self.inside :]], 1
        )
        for arg, each in frames.each.items():
            if arguments.get(arg) is not None:
                arguments[arg] = arguments[arg][:, self.first * each : self.end * each]
        if frames.count:
            arguments[frames.count] = self.before + self.inside + self.behind

    def narrow(self, out_BLC: torch.Tensor) -> torch.Tensor:
        """Return the rows of local tokens."""
        _, own, _, rest = out_BLC.split(
            [self.before, self.inside, self.behind, out_BLC.shape[1] - sum(self[2:])], 1
        )
        return torch.cat([own, rest], 1)


def frame_tokens(frames: Frames, all_tokens: Mapping[str, int], arguments: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens a frame has, and all frames together. ``arguments`` of all frames.
    Raises ModelError if frames do not have equally many.
    """
    arg, each = next(iter(frames.each.items()))
    count, whole = (
        arguments[arg].shape[1] // each,
        arguments[frames.count] if frames.count else all_tokens[frames.stream],
    )
    if whole % count:
        raise ModelError(
            f"{whole} tokens cannot be divided into {count} frames of {arg}: this model cannot be split by"
            " its plan."
        )
    return whole // count, whole


def inserts_of(plan: TokenPlan) -> Iterator[Insert]:
    for group in plan.blocks:
        yield from group.inserts


def modules_at(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules of a path, in which ``*`` stands for any name."""
    wanted = path.split(".")
    for name, module in model.named_modules():
        names = name.split(".")
        if len(names) == len(wanted) and all(
            one in ("*", here) for one, here in zip(wanted, names, strict=True)
        ):
            yield module
