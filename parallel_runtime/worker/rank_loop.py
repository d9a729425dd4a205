"""Wait for a message on the rank's own socket, handle it, answer. A rank never waits in a
collective while idle.

A GPU's evaluation is answered when it has computed it. Meanwhile the next one is enqueued, so that
the GPU need not wait for this process.
"""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from ..comm.exchange import Stopped
from ..errors import NoRoom, PipeMeshError
from ..patches import Part
from ..wire.arena import Board
from ..wire.channel import Channel
from ..wire.messages import PHASE, Close, Done, Failed, FailureKind, Forward, Request
from ..wire.segment import Segment
from .device_memory import DeviceMemory, is_out_of_memory
from .handler import Enqueued, RequestHandler, Skipped, Stand
from .trail import Trail

AHEAD = 2  # evaluations, or patches of one, that a GPU may have before it: a cancel waits for them
LOOK_S = 2e-4  # between two looks for what has come, where a core has more to do
SPIN_S = 1e-3  # without a pause, for a request: the sampler asks for the next evaluation soon
PAUSE = 1e-3  # of the time that a GPU has taken: the pause between two looks at it
SLACK_S = 5e-5  # what the system adds to any pause
ALLOWED = 100_000  # objects that an evaluation may leave: more, as of one that compiles, are looked at
CPU = torch.device("cpu")


class RankLoop:
    """The loop of one rank, which computes on ``device``. Serves methods too: notes their progress,
    reserves memory, tells which part comes next. ``spins``: with a GPU and enough cores it waits by
    looking again and again, because a sleeping process is woken too late.
    """

    def __init__(
        self,
        channel: Channel,
        board: Board,
        rank: int,
        memory: DeviceMemory,
        device: torch.device = CPU,
        spins: bool = False,
    ):
        self._channel = channel
        self._board = board
        self._rank = rank
        self._memory = memory
        # Messages that were read before their turn
        self._ahead: deque[tuple[Request | Close, list[int]]] = deque()
        self._device = device
        self._spins = spins and device.type == "cuda"
        self.trail: Trail | None = None  # of the request at hand, on a GPU
        self._enqueued: deque[tuple[Enqueued, Trail]] = deque()  # evaluations that are not answered
        self._request: Request | None = None  # at hand

    def wants_stop(self) -> bool:
        """Returns whether the UI has cancelled the present request."""
        return self._request is not None and self._request.request <= self._board.cancelled_request

    def tick(self) -> None:
        """Counts progress, by which hangs are recognised, and sends the answers that the device has
        computed while this process enqueues more.
        """
        self._board.tick(self._rank)
        is_ours = threading.current_thread() is threading.main_thread()  # others tick while torch compiles
        if is_ours and self.trail is not None:
            self.trail.note()
        if self._enqueued and is_ours and self._is_first_over():
            self._send_first()

    def note(self, phase: str) -> None:
        self._board.note(self._rank, phase)

    def count(self, done: int, total: int) -> None:
        """Notes how much of the request at hand is done: bytes of a load, weights of a patching."""
        self._board.count(self._rank, done, total)

    def next_part(self) -> Part | None:
        """Returns the part that the next message asks for, if it is here already and for the same
        model.
        """
        message, now = self._arrived(), self._request
        return (
            message.part
            if isinstance(message, Forward) and isinstance(now, Forward) and message.model == now.model
            else None
        )

    def _arrived(self) -> Request | Close | None:
        """Returns the next message, if it is here already."""
        while not self._ahead and select.select([self._channel], [], [], 0)[0]:
            self._ahead.extend(self._channel.pump())
        return self._ahead[0][0] if self._ahead else None

    def reserve(self, nbytes: int) -> None:
        """Checks that this rank's device has ``nbytes`` free. Raises NoRoom."""
        self._memory.reserve(nbytes)

    def serve(self, handler: RequestHandler) -> None:
        """Answers messages until Close, or until the UI is gone (ChannelClosed)."""
        while True:
            if self._enqueued:
                self._send_what_is_computed()
            if not self._enqueued:
                self._board.enter(self._rank, "waiting")
            began = time.perf_counter()
            while self._spins and self._arrived() is None and time.perf_counter() - began < SPIN_S:
                pass
            # All that has come: what stayed in the channel would not be seen to have arrived
            while not self._ahead:
                self._ahead.extend(self._channel.pump())
            message, fds = self._ahead.popleft()
            if isinstance(message, Close):
                return
            self._board.enter(self._rank, PHASE[type(message)], message.request)
            self._request = message
            if self._device.type == "cuda":
                self.trail = Trail(self._device, partial(self._board.tick, self._rank))
            answer = self._answered(
                message, partial(self._handle, handler, message, fds), partial(handler.stand, message)
            )
            if isinstance(answer, Enqueued):
                assert self.trail is not None
                self._enqueued.append((answer, self.trail))
            else:
                while self._enqueued:
                    self._send_first()
                self._send(answer)
            del answer  # the memory of an output is ComfyUI's from now on
            gc.collect(1 if isinstance(message, Forward) else 2)  # 1: of what is new

    def _send_what_is_computed(self) -> None:
        """Send the answers that the device has come to, until it has nothing left to compute, or
        another evaluation can be enqueued. Answers go in the order of their requests.
        """
        began = time.perf_counter()
        while self._enqueued:
            if self._is_first_over():
                self._send_first()
                began = time.perf_counter()
            elif (arrived := self._arrived()) is None:
                pause_s = PAUSE * (time.perf_counter() - began) if self._spins else LOOK_S
                if pause_s > SLACK_S:
                    select.select([self._channel], [], [], pause_s)
            elif isinstance(arrived, Forward) and len(self._enqueued) < AHEAD:
                return
            else:
                self._send_first()

    def _is_first_over(self) -> bool:
        """Whether the device has come to the end of the evaluation that was enqueued first."""
        first, trail = self._enqueued[0]
        trail.look()
        return first.reached.is_over()

    def _send_first(self) -> None:
        """Waits until the device has come to the evaluation that was enqueued first, and answers
        it.
        """
        first, trail = self._enqueued.popleft()

        def compute() -> Done:
            trail.wait_for(first.reached)
            return first.answer()

        answer = self._answered(first.request, compute, lambda: first.stand)
        assert not isinstance(answer, Enqueued)
        self._send(answer)

    def _send(self, answer: Done | Failed) -> None:
        """Sends an answer. After a lack of memory the cache is emptied behind it: that waits for
        the device, which may wait for other ranks.
        """
        self._channel.send(answer)
        if isinstance(answer, Failed) and answer.kind == "memory":
            gc.collect()
            self._memory.empty_cache()

    def _answered(
        self, request: Request, compute: Callable[[], Done | Enqueued], stand: Callable[[], Stand]
    ) -> Done | Failed | Enqueued:
        """Returns the answer of ``compute``. Every error becomes an answer: the UI decides whether
        the pool can go on.
        """
        try:
            return compute()
        except Stopped:
            return Done(request=request.request, memory=self._memory.now(), cancelled=True)
        except Exception as error:  # noqa: BLE001
            kind, trace = kind_of(error), traceback.format_exc()
            text = f"{type(error).__name__}: {error}" if kind == "error" else str(error)
            place = stand()
            at = None if self._memory.is_dead(error) else place.at
        return Failed(
            request=request.request,
            kind=kind,
            phase=PHASE[type(request)],
            text=text,
            trace=trace,
            memory=self._memory.now(),
            at=at,
            complete=place.complete,
        )

    def _handle(self, handler: RequestHandler, request: Request, fds: list[int]) -> Done | Enqueued:
        segments = map_segments(fds) if fds else []
        try:
            with torch.inference_mode():
                return handler.handle(request, segments, self)
        finally:
            for segment in segments:
                segment.close()


def look_rarely() -> None:
    """Have Python look for garbage between requests: amid an evaluation, all ranks would wait for
    the one that looks. Objects that exist by now, a rank's imports, are never looked at.
    """
    gc.freeze()
    gc.set_threshold(ALLOWED, *gc.get_threshold()[1:])


def kind_of(error: Exception) -> FailureKind:
    """Returns the error's ``Failed.kind``."""
    if isinstance(error, Skipped):
        return "skipped"
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
