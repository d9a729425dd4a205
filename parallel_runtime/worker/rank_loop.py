"""Wait for a message on the rank's own socket, handle it, answer. A rank never waits in a
collective while idle.
"""

from __future__ import annotations

import gc
import os
import select
import traceback
from collections import deque
from typing import Literal

import torch

from ..comm.exchange import Stopped
from ..errors import NoRoom, PipeMeshError
from ..patches import Part
from ..wire.arena import Board
from ..wire.channel import Channel
from ..wire.messages import PHASE, Close, Done, Failed, Forward, Request
from ..wire.segment import Segment
from .device_memory import DeviceMemory, is_out_of_memory
from .handler import RequestHandler


class RankLoop:
    """The loop of one rank. Serves methods too: notes their progress, reserves memory, tells which
    part comes next.
    """

    def __init__(self, channel: Channel, board: Board, rank: int, memory: DeviceMemory):
        self._channel = channel
        self._board = board
        self._rank = rank
        self._memory = memory
        self._ahead: deque[tuple[Request | Close, list[int]]] = deque()  # messages that were read before their turn
        self._request: Request | None = None  # at hand

    def wants_stop(self) -> bool:
        """True if the UI has cancelled the request at hand."""
        return self._request is not None and self._request.request <= self._board.cancelled_request

    def tick(self) -> None:
        """Counts progress, by which hangs are judged."""
        self._board.tick(self._rank)

    def note(self, phase: str) -> None:
        """Notes a phase of the request at hand."""
        self._board.note(self._rank, phase)

    def next_part(self) -> Part | None:
        """Returns the part that the next message asks for, if it is here already and for the same
        model.
        """
        while not self._ahead and select.select([self._channel], [], [], 0)[0]:
            self._ahead.extend(self._channel.pump())
        message = self._ahead[0][0] if self._ahead else None
        now = self._request
        return message.part if isinstance(message, Forward) and isinstance(now, Forward) and message.model == now.model else None

    def reserve(self, nbytes: int) -> None:
        """Checks that this rank's device has so much free. Raises NoRoom."""
        self._memory.reserve(nbytes)

    def serve(self, handler: RequestHandler) -> None:
        """Answers messages until Close, or until the UI is gone (ChannelClosed)."""
        while True:
            self._board.enter(self._rank, "waiting")
            message, fds = self._ahead.popleft() if self._ahead else self._channel.receive()
            if isinstance(message, Close):
                return
            self._board.enter(self._rank, PHASE[type(message)], message.request)
            self._channel.send(self._answer(handler, message, fds))

    def _answer(self, handler: RequestHandler, request: Request, fds: list[int]) -> Done | Failed:
        """Handles the request. Every error becomes an answer: the UI decides whether the pool can
        go on.
        """
        self._request = request
        try:
            return self._handle(handler, request, fds)
        except Stopped:
            return Done(request=request.request, memory=self._memory.now(), cancelled=True)
        except Exception as error:  # noqa: BLE001
            kind, trace = kind_of(error), traceback.format_exc()
            text = f"{type(error).__name__}: {error}" if kind == "error" else str(error)
        # Only here are the error and its frames gone, which held all that was being computed.
        if kind == "memory":
            gc.collect()
            self._memory.empty_cache()
        return Failed(
            request=request.request,
            kind=kind,
            phase=PHASE[type(request)],
            text=text,
            trace=trace,
            memory=self._memory.now(),
            messages_done=handler.messages_done(request),
        )

    def _handle(self, handler: RequestHandler, request: Request, fds: list[int]) -> Done:
        segments = map_segments(fds)
        try:
            with torch.inference_mode():
                return handler.handle(request, segments, self)
        finally:
            for segment in segments:
                segment.close()


def kind_of(error: Exception) -> Literal["memory", "room", "refused", "error"]:
    """Returns the error's ``Failed.kind``."""
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, NoRoom):
        return "room"
    return "refused" if isinstance(error, PipeMeshError) else "error"


def map_segments(fds: list[int]) -> list[Segment]:
    try:
        return [Segment(fd, os.fstat(fd).st_size) for fd in fds]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
