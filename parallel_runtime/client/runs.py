"""Begin and end runs, in the UI and in the ranks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from itertools import count

from ..errors import ModelError, Refused, RunCancelled
from ..wire.messages import EndRun
from .run import Aside, PooledModel, Run, RunNames
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
        self._sampled: list[Run] = []  # that go on
        self.recent: deque[Run] = deque()  # the newest last

    @property
    def last(self) -> Run | None:
        return self.recent[-1] if self.recent else None

    def begin(self, model: PooledModel) -> Run:
        """Begins a sampler's run of ``model``; ends the run that it is in, if any."""
        if model.run is not None:
            self.end(model)
        run = model.run = self._remembered(Run(self._names(), model, is_sampled=True))
        self._sampled.append(run)
        session = self._sessions.live
        if session is not None:
            session.conditioning.begin_run()
        return run

    def of(self, model: PooledModel) -> Run:
        """Returns the run that ``model`` is in, or begins one.

        Some guiders evaluate a model beside the sampled one without announcing it: its run belongs
        to the sampled one's, ends with it, and adds to the same figures.
        """
        if model.run is None and not self._sampled:
            model.run = self._remembered(Run(self._names(), model))
        elif model.run is None:
            sampled = self._sampled[-1]
            model.run = Run(self._names(), model, began_s=sampled.began_s, evaluations=sampled.evaluations)
            sampled.joined.append(model)
        return model.run

    def beside(self, model: PooledModel) -> Run:
        """Begins a run that no sampler samples."""
        self.end(model)
        run = model.run = Aside(self._names(), model)
        return run

    def _names(self) -> RunNames:
        return RunNames(next(self._ids))

    def _remembered(self, run: Run) -> Run:
        self.recent.append(run)
        while len(self.recent) > KEPT or (
            len(self.recent) > 1 and sum(len(one.evaluations) for one in self.recent) > MOST_EVALUATIONS
        ):
            self.recent.popleft()
        return run

    def restart(self, run: Run) -> None:
        """Makes void all that ranks keep of the run so far; measured figures stay."""
        if run.names.branches:
            run.names = self._names()

    def end(self, model: PooledModel) -> None:
        """Ends the run that ``model`` is in, if any, and the runs that joined it; has the ranks
        free the memory that they keep for them. Never raises, so it cannot mask the run's own
        error.

        It does not wait for ranks that are still busy with cancelled work: ``end_owed`` tells them
        later.
        """
        run, model.run = model.run, None
        model.end_check()
        if run is None:
            return
        run.ended_s = time.time()
        if run.is_sampled:
            self._sampled.remove(run)
        if (session := self._sessions.live) is not None:
            session.owed.append(model)
        self.end_owed()
        for joined in run.joined:
            self.end(joined)

    def end_owed(self) -> None:
        """Has the ranks free the memory of ended runs, unless they are still busy. Call it again
        once they have left the work in flight.
        """
        session = self._sessions.live
        while session is not None and session.owed and session.pool.idle:
            model = session.owed.pop()
            if model in session.models:
                tell(session, model, self.beside_ui)

    def models(self) -> set[PooledModel]:
        """Returns the models of sampled runs, and of runs that joined them."""
        return {model for run in self._sampled for model in (run.model, *run.joined)}


def tell(session: Session, model: PooledModel, cleared: Collection[int] | None) -> None:
    """Has the ranks free the memory of a run, and waits a little, because an image is decoded next
    on the UI's own GPU. Logs errors.
    """
    until = time.monotonic() + END_WAIT_S
    arena_bytes, have_cut = session.cut_arena(), False
    cleared = session.pool.facts.everyone if cleared is None else tuple(cleared)
    try:
        is_late = lambda: time.monotonic() > until  # noqa: E731
        session.models[model].recorded = ()
        fields = {"model": model.name, "cleared": cleared, "arena_bytes": arena_bytes}
        answers = session.ask(EndRun, (), is_late, **fields)
        session.models[model].recorded = tuple(one.recorded for one in answers)
        have_cut = True
    except RunCancelled:  # they need longer: the next request waits for them
        pass
    except Exception as error:  # noqa: BLE001 - the run's own error is told, not this one
        have_cut = session.pool.idle and isinstance(error, (ModelError, Refused))  # a rank's: all answered
        log.warning("[PipeMesh] The memory of a run could not be freed: %s", error)
    if arena_bytes and have_cut:
        session.pool.arena.shrink()
