"""Begin and end runs, in the UI and in the ranks."""

from __future__ import annotations

import logging
from itertools import count

from ..errors import PipeMeshError
from ..wire.messages import EndRun
from .run import Run
from .session import Sessions

log = logging.getLogger("pipemesh")


class Runs:
    """The runs on one pool handle: at most one of each model at a time."""

    def __init__(self, sessions: Sessions):
        self._sessions = sessions
        self._ids = count(1)
        self._open: dict[str, Run] = {}
        self.last: Run | None = None

    def begin(self, model: str) -> Run:
        """A new run of ``model``. One that nobody has ended is ended first."""
        if model in self._open:
            self.end(self._open[model])
        run = self.last = self._open[model] = Run(next(self._ids), model)
        session = self._sessions.live
        if session is not None:
            session.conditioning.begin_run()
        return run

    def of(self, model: str) -> Run:
        """The run that ``model`` is in. Whoever evaluates it without a sampler begins one by
        that.
        """
        return self._open.get(model) or self.begin(model)

    def restart(self, run: Run) -> None:
        """Makes void what ranks keep of the run so far, if anything; what was measured stays."""
        if run.branches:
            run.id = next(self._ids)
            run.branches.clear()

    def end(self, run: Run) -> None:
        """Tells the ranks to free what they keep of the run. Never raises, so it cannot mask the
        run's own error.

        Ranks that are still busy with what was cancelled are not waited for: they free it when the
        next run begins.
        """
        if self._open.get(run.model) is not run:
            return
        del self._open[run.model]
        session = self._sessions.live
        if session is not None and run.model in session.models and session.pool.idle:
            try:
                session.ask(EndRun, model=run.model)
            except PipeMeshError as error:
                log.warning("[PipeMesh] %s", error)

    def models(self) -> set[str]:
        """Those that are in a run."""
        return set(self._open)
