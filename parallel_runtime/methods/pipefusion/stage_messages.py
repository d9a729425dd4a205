"""Receive a patch's hidden rows from the stage before, send them to the stage after.

Both happen once for every patch, even for one that fails here, so that stages stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch

from ...comm.stage_link import StageLink
from ...patches import Part
from ...stages import Stage
from .messages_done import MessagesDone


class StageDone(BaseException):
    """This stage's part of the forward is done. Not an Exception: host code catches those."""


class Hidden(NamedTuple):
    """The hidden rows of a patch, as they travel: all streams in one message."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tokens: list[torch.Tensor]) -> Hidden:
        return cls(sum(t.numel() for t in tokens), tokens[0].dtype, tokens[0].device)


class StageMessages:
    """The two messages of each patch. ``next_part`` tells which part the next request asks for, if
    it is known: its receive is posted early.
    """

    def __init__(self, stage: Stage, link: StageLink, next_part: Callable[[], Part | None]):
        self.done = MessagesDone(receives=not stage.is_first, sends=not stage.is_last)
        self._link = link
        self._next_part = next_part
        self._part: Part | None = None
        self._number = 0
        self._received: dict[Part, Hidden] = {}  # what came of each part of this run, and will come of it again
        self._here: Hidden | None = None

    def start(self, number: int, part: Part) -> None:
        """Begin to compute a patch. ``number`` is its request's: both ends check that it is the
        same.
        """
        self._number, self._part, self._here = number, part, None
        self._link.begin()

    def receive_hidden(self, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows that the stage before computed in place of ``tokens``, which are of their
        shapes.
        """
        assert self._part is not None
        hidden = Hidden.of(tokens)
        rows = self._link.receive(self._number, *hidden)
        self.done.received()
        self._received[self._part] = hidden
        self._expect_next()
        return [piece.view(t.shape) for piece, t in zip(rows.split([t.numel() for t in tokens]), tokens, strict=True)]

    def _expect_next(self) -> None:
        """Post the next patch's receive, so that it arrives while this one is computed."""
        part = self._next_part()
        coming = self._received.get(part) if part is not None else None
        if coming is not None:
            self._link.expect(coming.numel + 1, coming.dtype, coming.device)

    def enter(self, tokens: list[torch.Tensor]) -> None:
        """Note what is computed with: if that fails, as much is sent."""
        self._here = Hidden.of(tokens)

    @property
    def is_on_cuda(self) -> bool:
        return self._here is not None and self._here.device.type == "cuda"

    def send_hidden(self, out: torch.Tensor | tuple[torch.Tensor, ...]) -> NoReturn:
        """Send what the last own block returned, and leave the forward by StageDone."""
        tokens = out if isinstance(out, tuple) else (out,)
        self._link.send(self._number, torch.cat([t.reshape(-1) for t in tokens]))
        self.done.sent()
        raise StageDone

    def send_blank(self) -> None:
        """Send zeros for a patch that failed here, if its own blocks were reached."""
        if self.done.must_send and self._here is not None:
            numel, dtype, device = self._here
            self._link.send(self._number, torch.zeros(numel, dtype=dtype, device=device))
            self.done.sent()

    def check(self) -> None:
        """Raise RuntimeError where a patch that came was another request's. Call before an output
        leaves the last stage.
        """
        try:
            self._link.check()
        except RuntimeError:
            self.done.misread()
            raise

    def end_run(self) -> None:
        """Raises RuntimeError as ``check`` does."""
        self._received.clear()
        try:
            self._link.free_buffers()
        except RuntimeError:
            self.done.misread()
            raise
