"""Requests to groups of ranks, and their answers: submit, collect, abandon, settle.

Sequence parallelism submits one Forward and collects it; a pipeline has many in flight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..parallel_runtime.errors import PipeMeshError, PoolFailed, PoolSpent, RunCancelled
from ..parallel_runtime.wire.arena import Board
from ..parallel_runtime.wire.messages import Forward, Request
from .progress import Progress
from .ranks import Lost, Ranks
from .verdict import (
    STOPPED_WAIT_S,
    Facts,
    Meets,
    SentRequest,
    are_even,
    connected,
    judge,
    sentence_of_stall,
    told_before,
    wait_after_failure,
)

POLL_S = 0.05
CANCEL_WAIT_S = 10.0  # for ranks to leave what was cancelled; after that the next run waits for them
# Of the limit for hangs: ranks that were told to leave have that long without progress
LEAVE_STALLS_AFTER = 0.2


class StallClock:
    """Judges hangs by progress counters: a slow rank that still counts is healthy, and one that
    waits for another counts as long as that one does. ``progress`` reads a rank's counter.
    """

    def __init__(self, progress: Callable[[int], int], clock: Callable[[], float] = time.monotonic):
        self._progress = progress
        self._clock = clock
        self._seen: dict[int, int] = {}
        self.since = 0.0
        self._changed = clock()

    def stalled_rank(self, ranks: Sequence[int], stall_s: float) -> int | None:
        """Returns the rank that is furthest behind if none of ``ranks`` has moved for ``stall_s``
        seconds of the time ``since``, else None. A look at other ranks than last time begins anew.
        """
        seen = {rank: self._progress(rank) for rank in ranks}
        if seen != self._seen:
            self._seen, self._changed = seen, self._clock()
        if seen and self._clock() - max(self.since, self._changed) > stall_s:
            return min(seen, key=lambda rank: seen[rank])
        return None


class Conversation:
    """The work of a ``WorkerPool`` under its lock; the pool's docstrings say what callers get.
    Raises ``Lost`` if the pool cannot go on.
    """

    def __init__(self, ranks: Ranks, board: Board, facts: Facts, stall_s: float, progress: Progress):
        self.stall_s = stall_s
        self._progress = progress
        self._ranks = ranks
        self._board = board
        self._facts = facts
        # What ranks meet in while they compute a Forward
        self._in_forward = Meets.STAGES if facts.stages > 1 else Meets.SEQUENCE
        # By number, in the order of submission. Any thread may look
        self.in_flight: dict[int, SentRequest] = {}
        self._leave_by = math.inf  # when ranks that were told to leave what is in flight should have
        self._stalls = StallClock(board.progress)
        # For ranks that owe answers, by the first request that a failed one is connected with
        self._waits: dict[int, StallClock] = {}

    def submit(
        self, request: Request, group: Sequence[int], fds: Sequence[int], interrupted: Callable[[], bool]
    ) -> None:
        meets = self._in_forward if isinstance(request, Forward) else Meets.NOBODY
        sent = SentRequest(request.request, tuple(group), {*group}, meets, getattr(request, "title", ""))
        if not self.in_flight:
            self._leave_by = math.inf
            self._stalls.since = time.monotonic()
            self._waits.clear()
        self.in_flight[sent.number] = sent
        try:
            self._ranks.send(request, group, fds, lambda: stop_if(interrupted))
        except BaseException:
            del self.in_flight[sent.number]
            raise

    def call_back(self) -> None:
        self._ranks.cancel(max(self.in_flight, default=0))

    def _cancel(self) -> None:
        """Sets the cancel flag, and gives the ranks ``CANCEL_WAIT_S`` from the first time on."""
        if self._leave_by == math.inf:
            self._stalls.since = time.monotonic()
            self._leave_by = self._stalls.since + CANCEL_WAIT_S
        self.call_back()

    def collect(self, number: int, interrupted: Callable[[], bool]) -> dict[int, Any]:
        request = self.in_flight[number]
        try:
            cancelled = self._listen([request], interrupted, leave=request.meets is not Meets.NOBODY)
            self._pass_judgement()
            if not request.owing:
                del self.in_flight[number]
            if cancelled or request.owing:
                raise RunCancelled("The run was cancelled.")
        except BaseException:
            self._progress.clear()
            raise
        finally:
            request.awaited = False
        self._progress.end()
        return dict(sorted(request.answers.items()))

    def abandon(self) -> None:
        """Waits at most ``CANCEL_WAIT_S`` since the ranks were first told to leave."""
        for one in self.in_flight.values():
            one.awaited = False
        if self.in_flight:
            self._cancel()
            self._drain(lambda: False, until=self._leave_by)

    def settle(self, interrupted: Callable[[], bool]) -> None:
        if not all(one.awaited for one in self.in_flight.values()):
            self._drain(interrupted)

    def _drain(self, interrupted: Callable[[], bool], until: float = math.inf) -> None:
        outstanding = [one for one in self.in_flight.values() if not one.awaited]
        if self._listen(outstanding, interrupted, leave=False, until=until):
            raise RunCancelled("The run was cancelled.")
        self._pass_judgement(forgiven=True)
        for one in outstanding:
            if not one.owing:
                self.in_flight.pop(one.number, None)
        self._progress.end()

    def _listen(
        self,
        wanted: Sequence[SentRequest],
        interrupted: Callable[[], bool],
        *,
        leave: bool,
        until: float = math.inf,
    ) -> bool:
        """Takes answers until all ``wanted`` requests have them, and all requests whose outcome a
        failure leaves in doubt. With ``leave`` a cancel is passed on to the ranks, which then have
        ``CANCEL_WAIT_S``. Returns whether it was cancelled. Raises Lost if ranks hang, but not
        during a wait with a limit.
        """
        cancelled = False
        doubtful: list[SentRequest] = []
        while any(one.owing for one in [*wanted, *doubtful]):
            limit = min([until, *(one.due for one in doubtful)])
            if time.monotonic() > limit:
                break
            try:
                said = self._ranks.listen(POLL_S)
            except Lost as lost:
                raise self._cause_of(lost) from lost.__cause__
            for rank, answer in said:
                request = self.in_flight.get(getattr(answer, "request", 0))  # Ready answers the start
                if request is not None:
                    request.take(rank, answer)
            if any(one.has_failed for one in self.in_flight.values()):
                doubtful = self._in_doubt(cancelled)
            if not said:
                owing = sorted(set().union(*(one.owing for one in self.in_flight.values())))
                self._progress.look(
                    [self._board.phase(rank) for rank in owing],
                    next((one.title for one in self.in_flight.values() if one.title), ""),
                    is_wanted=any(one.awaited for one in wanted),
                )
                self._ranks.check(owing)
                if limit == math.inf:  # else the wait ends by itself
                    self._fail_if_stalled(owing)
            if not cancelled and interrupted():
                cancelled = True
                if not leave:
                    break
                self._cancel()
                until = min(until, self._leave_by)
        return cancelled

    def _cause_of(self, lost: Lost) -> Lost:
        """Returns the failure that a rank's death follows from, or else the death itself."""
        requests = list(self.in_flight.values())
        told = None if lost.rank is None else told_before(lost.rank, requests, self._facts)
        return lost if told is None else lost_by(*told)

    def _in_doubt(self, is_stopped: bool) -> list[SentRequest]:
        """Returns the requests that ranks owe answers to because a rank has failed, or that left
        ranks uneven. They are waited for until none of these ranks has moved for a while, and
        not for long once the run ``is_stopped``.
        """
        doubtful: list[SentRequest] = []
        for side in connected(list(self.in_flight.values())):
            known, number = self._waits, side[0].number
            if number not in known:
                known[number] = StallClock(self._board.progress, time.monotonic)
                if any(one.meets is Meets.STAGES and one.has_failed for one in side):
                    self._cancel()
            now, wait_s = time.monotonic(), wait_after_failure(side)
            owing = sorted(set().union(*(one.owing for one in side)))
            due = now + STOPPED_WAIT_S if is_stopped and wait_s < math.inf else math.inf
            if known[number].stalled_rank(owing, wait_s) is not None:
                due = now
            for one in side:
                one.due = min(one.due, due)
            doubtful += [one for one in side if not are_even(one)]
        return doubtful

    def _fail_if_stalled(self, owing: Sequence[int]) -> None:
        """Raises Lost."""
        stall_s = self.stall_s * (1.0 if self._leave_by == math.inf else LEAVE_STALLS_AFTER)
        rank = self._stalls.stalled_rank(owing, stall_s)
        if rank is not None:
            where, phase = self._facts.where(rank), self._board.phase(rank)
            raise Lost(sentence_of_stall(where, phase, stall_s), rank)

    def _pass_judgement(self, *, forgiven: bool = False) -> None:
        """Raises the error of a failure in flight; a loss of the pool comes first. The failed
        request, and the requests connected with it, are over then. Answers that ranks will still
        give by themselves are left to ``collect`` or ``settle``.
        """
        if not any(one.has_failed for one in self.in_flight.values()):
            return
        verdicts = []
        for side in connected(list(self.in_flight.values())):
            if any(one.owing for one in side) and math.isinf(wait_after_failure(side)):
                continue
            verdict = judge(side, self._facts, forgiven=forgiven)
            if verdict is not None:
                verdicts.append((*verdict, side))
        if not verdicts:
            return
        error, rank, side = min(verdicts, key=lambda one: not isinstance(one[0], (PoolFailed, PoolSpent)))
        if isinstance(error, (PoolFailed, PoolSpent)):
            raise lost_by(error, rank)
        for one in side:
            del self.in_flight[one.number]
        raise error


def lost_by(error: PipeMeshError, rank: int) -> Lost:
    """Turns the error that a rank failed with into the loss of the pool."""
    return Lost(str(error), rank, PoolSpent if isinstance(error, PoolSpent) else PoolFailed)


def stop_if(interrupted: Callable[[], bool]) -> None:
    if interrupted():
        raise RunCancelled("The run was cancelled.")
