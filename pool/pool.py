"""The worker pool: ranks as processes, requests to groups of them, and the state it is in.

starting -> ready -> failed or closed; ready shows as busy while an answer is awaited. A failed pool
is never mended: ``PoolHandle`` starts a fresh one. The UI is the single controller; every method is
called from one thread at a time (the lock makes a second caller wait).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from ..parallel_runtime.errors import LayoutError, PipeMeshError, PoolFailed, RunCancelled
from ..parallel_runtime.wire.arena import Arena
from ..parallel_runtime.wire.messages import Done, Memory, Ready, Request
from .conversation import Conversation, stop_if
from .devices import Placement
from .progress import Progress
from .rank_setup import RankSetup
from .ranks import Lost, Ranks
from .rendezvous import MachineMissing
from .verdict import Facts, SentRequest

log = logging.getLogger("pipemesh")

CLOSE_GRACE_S = 5.0


def never() -> bool:
    return False


def refused_kernels(ready: Sequence[Ready]) -> tuple[str, ...]:
    """Returns a sentence for each attention kernel that a rank found wrong."""
    return tuple(dict.fromkeys(sentence for one in ready for sentence in one.refused_kernels))


class WorkerPool:
    """Ranks that wait for requests. Not started until ``start``."""

    def __init__(self, placement: Placement, setup: RankSetup):
        layout = placement.layout
        names = tuple(device.name for device in placement.devices)
        self.placement = placement
        self.facts = Facts(names, stages=layout.stages, speeds=placement.speeds)
        self.arena = Arena()
        self.ranks = Ranks(placement, setup, self.arena, self.facts)
        self.memory: list[Memory] = []  # of every rank, as it last told
        self.ready: tuple[Ready, ...] = ()  # what every rank said when it had joined
        self.next_request: Callable[[], int] = partial(next, count(1))
        progress = Progress(len(names), setup.tell, self.arena.board)
        self._conversation = Conversation(self.ranks, self.arena.board, self.facts, setup.stall_s, progress)
        self._lock = threading.RLock()
        self._life = "starting"  # then ready, failed or closed

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``busy``, ``failed`` or ``closed``."""
        in_flight = list(self._conversation.in_flight.values())
        return "busy" if self._life == "ready" and any(one.awaited for one in in_flight) else self._life

    @property
    def is_whole(self) -> bool:
        """Returns whether it can take requests: it is ready, and has lost no rank meanwhile."""
        return self._life == "ready" and not self.ranks.has_lost_one(not self._conversation.in_flight)

    @property
    def fault(self) -> str:
        """Says why the pool cannot take requests, with the last log lines of the lost rank; empty
        if no rank was lost.
        """
        return self.ranks.fault or (self.ranks.loss() if self._life == "ready" else "")

    @property
    def idle(self) -> bool:
        """True if a request would be handled at once. May be asked from any thread."""
        return self._life == "ready" and not self._conversation.in_flight

    # -- life

    def start(self, interrupted: Callable[[], bool] = never) -> None:
        """Starts every rank and waits until each has said Ready. Raises PoolFailed,
        RunCancelled.
        """
        began, everyone = time.monotonic(), self.facts.everyone
        with self._lock:
            try:
                self.ranks.start()
                self._conversation.in_flight[0] = SentRequest(0, everyone, {*everyone})
                self.ready = tuple(self._conversation.collect(0, interrupted).values())
                self.memory = [one.memory for one in self.ready]
            except Lost as lost:
                raise self._fail(lost) from lost.__cause__
            except (MachineMissing, LayoutError) as error:
                raise self._fail(Lost(str(error))) from error
            except OSError as error:
                sentence = (
                    f"The worker processes could not be started ({error}): free memory or processes and run"
                    " again."
                )
                raise self._fail(Lost(sentence)) from error
            except BaseException:
                self.close()
                raise
            self._life = "ready"
        log.info("[PipeMesh] %s ready in %.1f s", self.placement.layout.equation(), time.monotonic() - began)
        for sentence in refused_kernels(self.ready):
            log.warning("[PipeMesh] %s", sentence)

    def close(self, grace_s: float = CLOSE_GRACE_S, life: str = "closed") -> None:
        """Ends every rank and gives everything back; the pool is ``life`` then. Safe in every
        state, any number of times.
        """
        with self._lock:
            was_up, grace_s = self._life in ("starting", "ready"), grace_s if self.idle else 0
            self._life = life
            if was_up:
                self.ranks.stop(grace_s)
                self._conversation.in_flight.clear()  # with answers that brought memory
                self.arena.close()

    def _fail(self, lost: Lost) -> PipeMeshError:
        """Ends the pool; returns the error to raise, with the last log lines of the rank it is
        about.
        """
        if self.ranks.are_killed:
            self.close(0)
            return RunCancelled("ComfyUI ends.")
        sentence = lost.sentence
        if lost.rank is not None:
            sentence += self.ranks.last_lines(lost.rank)
        self.ranks.fault = sentence
        self.close(0, "failed")
        return lost.error(sentence)

    # -- requests

    @contextmanager
    def _conversing(self) -> Iterator[Conversation]:
        """Gives the conversation of a ready pool to one caller at a time; a caller may come again
        inside. Raises PoolFailed if the pool is over, or ends meanwhile.
        """
        with self._lock:
            if self._life != "ready":
                raise PoolFailed(f"The pool is {self._life}: run again to start a fresh one.")
            try:
                yield self._conversation
            except Lost as lost:
                raise self._fail(lost) from lost.__cause__

    def ask(
        self, request: Request, fds: Sequence[int] = (), interrupted: Callable[[], bool] = never
    ) -> list[Done]:
        """Submits ``request`` to every rank, once nothing cancelled is outstanding, and collects
        the answers, in rank order. Raises what ``submit`` and ``collect`` raise.
        """
        with self._conversing():
            stop_if(interrupted)
            self.settle(interrupted)
            self.submit(request, self.facts.everyone, fds, interrupted)
            return list(self.collect(request.request, interrupted).values())

    def submit(
        self,
        request: Request,
        group: Sequence[int],
        fds: Sequence[int] = (),
        interrupted: Callable[[], bool] = never,
    ) -> None:
        """Sends ``request`` to the ranks of ``group`` without waiting; each rank answers in the
        order of its requests. ``collect`` or ``abandon`` must follow.

        Raises PoolFailed. Raises RunCancelled if a cancel comes while tensors travel to another
        machine, which ends the pool. Any other error leaves the pool as it was.
        """
        with self._conversing() as conversation:
            try:
                conversation.submit(request, group, fds, interrupted)
            except RunCancelled:
                self.close(0)
                raise

    def call_back(self) -> None:
        """Sets the cancel flag of the requests in flight: ranks leave them at their next block,
        without a deadline. They still answer, and ``collect`` waits for the answers.
        """
        with self._conversing() as conversation:
            conversation.call_back()

    def collect(self, number: int, interrupted: Callable[[], bool] = never) -> dict[int, Done]:
        """Waits for the answers to a submitted request; returns them by rank. Done may say
        ``cancelled``.

        A cancelled Forward is left early by all its ranks at the same block. Any other request is
        finished by them, and waited for by ``settle``. Raises RunCancelled, ModelError or Refused
        (the ranks rejected it): the pool stays warm; what else is in flight is to be abandoned.
        Raises PoolFailed.
        """
        with self._conversing() as conversation:
            answers = conversation.collect(number, interrupted)
            self.memory = [
                answers[rank].memory if rank in answers else known for rank, known in enumerate(self.memory)
            ]
            return answers

    def abandon(self) -> None:
        """Cancels the requests in flight and waits a while until the ranks have left them. Raises
        no PipeMeshError: the caller has an error to report already.
        """
        with suppress(PipeMeshError), self._conversing() as conversation:
            conversation.abandon()

    def settle(self, interrupted: Callable[[], bool] = never) -> None:
        """Waits for answers outstanding from cancelled requests, so that a late one is not mistaken
        for the next request's, and nothing in the arena is overwritten that ranks still read.

        Raises RunCancelled, and PoolFailed if a rank failed or hangs meanwhile.
        """
        with self._conversing() as conversation:
            conversation.settle(interrupted)
