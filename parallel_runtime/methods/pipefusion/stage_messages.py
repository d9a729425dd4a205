"""Receive a patch's hidden rows from the stage before, send them to the stage after.

Both happen once for every patch, also for one that all ranks of this stage leave. Both ends know
how long a message is from an earlier one of the same part; the first is announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch

from ...comm.stage_link import StageLink
from ...errors import ModelError
from ...patches import Part
from ...stages import Stage


class StageDone(BaseException):
    """This stage's part of the forward is done. Not an Exception: host code catches those."""


class Hidden(NamedTuple):
    """The hidden rows of a patch, as they travel: all streams in one message."""

    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tokens: list[torch.Tensor]) -> Hidden:
        return cls(sum(t.numel() for t in tokens), tokens[0].dtype)


@dataclass
class MessagesLeft:
    """The messages that are left of one patch: whether the stage has still to ``receive`` and to
    ``send``. ``is_lost``: it is not known which message of the link is this patch's.
    """

    receive: bool = False
    send: bool = False
    is_lost: bool = False

    @property
    def any(self) -> bool:
        return self.receive or self.send


class StageMessages:
    """The two messages of each patch. ``next_part`` tells which part the next request asks for, if
    it is known: its receive is posted early.
    """

    def __init__(self, stage: Stage, link: StageLink, next_part: Callable[[], Part | None]):
        self._ends = not stage.is_first, not stage.is_last  # where it receives, and sends
        self.left = MessagesLeft()
        self._link = link
        self._next_part = next_part
        self._part = Part(0, 0)
        self.number = 0  # of its request: both ends check that it is the same
        # What came of each part of this run, and will come of it again
        self._received: dict[Part, Hidden] = {}
        self._sent: dict[Part, Hidden] = {}  # likewise
        self.device = torch.device("cpu")  # where rows are computed

    def begin(self, part: Part, number: int) -> None:
        """Open a patch, of that request. Raises ModelError after a patch of the same run whose
        messages are still in the link: this one would find them.
        """
        if part.run == self._part.run and self.left.any:
            raise ModelError("A patch before this one failed on its way through the stages: run again.")
        self.left = MessagesLeft(*self._ends)
        self._part, self.number = part, number

    def receive_hidden(self, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows that the stage before computed in place of ``tokens``, in the same
        shapes; zeros if it had no rows to send. Raises ModelError if the shapes differ.
        """
        hidden, self.device = Hidden.of(tokens), tokens[0].device
        self._link.prepare(hidden.numel + 1, hidden.dtype, self.device)
        self.left.is_lost = True  # until the message is here
        rows = self._link.receive(
            self.number, *hidden, self.device, is_announced=self._received.get(self._part) != hidden
        )
        self.left.receive = self.left.is_lost = False
        if rows is None:
            return [torch.zeros_like(t) for t in tokens]
        self._received[self._part] = came = Hidden.of([rows])
        if came != hidden:
            raise ModelError(
                f"A stage of the pipeline has {hidden.numel} numbers ({hidden.dtype}) of a patch, and the"
                f" stage before sends {came.numel} ({came.dtype}): queue again, and if they differ again,"
                " set pipefusion to 1 and report it."
            )
        # Post the next patch's receive, so that it arrives while this one is computed
        part = self._next_part()
        coming = self._received.get(part) if part is not None else None
        if coming is not None:
            self._link.expect(coming.numel + 1, coming.dtype, self.device)
        return [
            piece.view(t.shape)
            for piece, t in zip(rows.to(self.device).split([t.numel() for t in tokens]), tokens, strict=True)
        ]

    def send_hidden(self, out: torch.Tensor | tuple[torch.Tensor, ...]) -> NoReturn:
        """Send the output of the last block of this stage, and leave the forward by StageDone."""
        tokens = list(out) if isinstance(out, tuple) else [out]
        hidden = Hidden.of(tokens)
        rows = torch.cat([t.reshape(-1) for t in tokens])
        self._link.send(self.number, rows, is_announced=self._sent.get(self._part) != hidden)
        self._sent[self._part] = hidden
        self.left.send = False
        raise StageDone

    def take(self) -> None:
        """Take the message of a patch that failed here, or that all leave, if one is to come."""
        if self.left.receive and not self.left.is_lost:
            self.left.is_lost = True
            came = self._link.discard(self._received.get(self._part), self.device)
            if came is not None:
                self._received[self._part] = Hidden(*came)
            self.left.receive = self.left.is_lost = False

    def go_through(self) -> None:
        """Receive and send the messages that are left of an unfinished patch: nobody uses its
        rows.
        """
        self.take()
        if self.left.send:
            known = self._sent.get(self._part)
            if known is None:
                self._link.announce_nothing()
            else:
                self._link.send(self.number, torch.zeros(known.numel, dtype=known.dtype, device=self.device))
            self.left.send = False

    def check(self) -> None:
        """Raise RuntimeError if a received patch belonged to another request. Call it before an
        output leaves the last stage.
        """
        try:
            self._link.check()
        except RuntimeError:
            self._misread()
            raise

    def _misread(self) -> None:
        """Note that another patch's message was taken, and this one's is in the link."""
        self.left.receive, self.left.is_lost = self._ends[0], True

    def end_run(self) -> None:
        """Raises RuntimeError as ``check`` does."""
        self._received.clear()
        self._sent.clear()
        try:
            self._link.free_buffers()
        except RuntimeError:
            self._misread()
            raise
