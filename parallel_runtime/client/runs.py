"""Begin and end runs, in the UI and in the ranks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from itertools import count

from ..errors import ModelError, PipeMeshError, Refused, RunCancelled
from ..weights.background_check import BackgroundCheck
from ..wire.messages import EndRun
from .run import Aside, Run, RunNames
from .session import Session, Sessions

# For ranks to free what they keep of a run; the next request waits for those that need longer
END_WAIT_S = 2.0
KEPT = 10  # runs, for those who ask what was sampled
MOST_EVALUATIONS = 8192  # of these: a pipeline has one for every patch, of some 4 KiB
log = logging.getLogger("pipemesh")


class Runs:
    """Keeps the runs of one pool handle: at most one of each model at a time."""

    def __init__(self, sessions: Sessions, beside_ui: Collection[int] | None = None):
        """``beside_ui``: the ranks on the UI's own device; None: any may be."""
        self._sessions = sessions
        self.beside_ui = beside_ui
        self._ids = count(1)
        self._open: dict[str, Run] = {}
        self.owed: list[str] = []  # models of ended runs, until their ranks have heard of it
        # Models in a run, ranks of which may keep a state of it that no fresh copy has, a node's
        # cache or count in the blocks: which of the model's loads that is in
        self.stateful: dict[str, int] = {}
        self.checks: dict[str, BackgroundCheck] = {}  # of models that ranks compute
        sessions.at_close.append(self._end_checks)
        self.recent: deque[Run] = deque()  # the newest last

    @property
    def last(self) -> Run | None:
        return self.recent[-1] if self.recent else None

    def begin(self, model: str) -> Run:
        """Begins a sampler's run of ``model``; ends the run that it is in, if any."""
        self.end(model)
        run = self._remembered(self._opened(Run(self._names(), model, is_sampled=True)))
        session = self._sessions.live
        if session is not None:
            session.conditioning.begin_run()
        return run

    def of(self, model: str) -> Run:
        """Returns the run that ``model`` is in, or begins one.

        Some guiders evaluate a model beside the sampled one without announcing it: its run belongs
        to the sampled one's, ends with it, and adds to the same figures.
        """
        if model in self._open:
            return self._open[model]
        sampled = next((run for run in reversed(self._open.values()) if run.is_sampled), None)
        if sampled is None:
            run = self._remembered(Run(self._names(), model))
        else:
            run = Run(self._names(), model, began_s=sampled.began_s, evaluations=sampled.evaluations)
            sampled.joined.append(model)
        return self._opened(run)

    def beside(self, model: str) -> Run:
        """Begins a run of what no sampler samples."""
        self.end(model)
        return self._opened(Aside(self._names(), model))

    def _names(self) -> RunNames:
        return RunNames(next(self._ids))

    def _remembered(self, run: Run) -> Run:
        self.recent.append(run)
        while len(self.recent) > KEPT or (
            len(self.recent) > 1 and sum(len(one.evaluations) for one in self.recent) > MOST_EVALUATIONS
        ):
            self.recent.popleft()
        return run

    def _opened(self, run: Run) -> Run:
        self._open[run.model] = run
        return run

    def restart(self, run: Run) -> None:
        """Makes void what ranks keep of the run so far, if anything; what was measured stays."""
        if run.names.branches:
            run.names = self._names()

    def note_fault(self, model: str, error: PipeMeshError) -> None:
        """Keeps why the run that ``model`` is in cannot go on, unless users cancelled it."""
        if model in self._open and not isinstance(error, RunCancelled):
            self._open[model].fault = str(error).partition("\n")[0]

    def end(self, model: str) -> None:
        """Ends the run that ``model`` is in, if any, and those that joined it; has the ranks free
        what they keep of them. Never raises, so it cannot mask the run's own error.

        Ranks that are still busy with what was cancelled are not waited for: ``end_owed`` tells
        them.
        """
        run = self._open.pop(model, None)
        self.stateful.pop(model, None)
        self.end_check(model)
        if run is None:
            return
        run.ended_s = time.time()
        self.owed.append(model)
        self.end_owed()
        for joined in run.joined:
            self.end(joined)

    def end_check(self, model: str) -> None:
        """Ends the comparison of the model's weights while it is in a run."""
        if (check := self.checks.pop(model, None)) is not None:
            check.end()

    def _end_checks(self) -> None:
        """Ends the comparisons that the end of no run ends, as nobody said that the model is
        sampled: the ranks that they were for are gone.
        """
        for model in {*self.checks} - self.models():
            self.end_check(model)

    def end_owed(self) -> None:
        """Has the ranks free what they keep of ended runs, unless they are still busy. Call it
        again once they have left what was in flight.
        """
        session = self._sessions.live if self.owed else None
        while self.owed and (session is None or session.pool.idle):
            model = self.owed.pop()
            if session is not None and model in session.models:
                tell(session, model, self.beside_ui)

    def models(self) -> set[str]:
        """Returns the models of sampled runs, and of runs that joined them."""
        sampled = [run for run in self._open.values() if run.is_sampled]
        return {model for run in sampled for model in (run.model, *run.joined)}


def tell(session: Session, model: str, cleared: Collection[int] | None) -> None:
    """Has the ranks free what they keep of a run, and waits a little: on the UI's own GPU an image
    is decoded next. Logs errors.
    """
    until = time.monotonic() + END_WAIT_S
    arena_bytes, have_cut = session.cut_arena(), False
    cleared = session.pool.facts.everyone if cleared is None else tuple(cleared)
    try:
        is_late = lambda: time.monotonic() > until  # noqa: E731
        session.ask(EndRun, (), is_late, model=model, cleared=cleared, arena_bytes=arena_bytes)
        have_cut = True
    except RunCancelled:  # they need longer: the next request waits for them
        pass
    except Exception as error:  # noqa: BLE001 - the run's own error is told, not this one
        have_cut = session.pool.idle and isinstance(error, (ModelError, Refused))  # a rank's: all answered
        log.warning("[PipeMesh] Freeing the memory of a run: %s", error)
    if arena_bytes and have_cut:
        session.pool.arena.shrink()
