"""A runtime of auto mode with one pool, of two ranks."""

from pathlib import Path

from pipemesh.launcher.pool.devices import place
from pipemesh.launcher.trial.host_trials import HostTrials, Trials, Verdicts
from pipemesh.nodes.planning import PlannedLayout, Planning
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.counts import Counts, nobody


def no_trials():
    """Host trials that are turned off."""
    return HostTrials(Path(), Trials("", lambda kind, tell: (True, ""), Verdicts(Path())), is_on=False)


class Begun:
    """A wait: whether it was begun, and has not ended."""

    def __init__(self):
        self.lasts = False

    def begin(self):
        self.lasts = True

    def came(self):
        self.lasts = False

    def end(self):
        self.lasts = False


class SharedRuntime:
    """``client``: of its pool. ``choices``: what was parallelized."""

    def __init__(self, client):
        self._client = client
        self.choices = []
        self.wait = Begun()
        self.trials = no_trials()
        self.planning = Planning(StepTimes(first_step=self.wait.came), Counts(nobody))

    def plan(self, model, choice, asked, to_come=None):
        self.wait.begin()
        return PlannedLayout(choice.placement.layout, "there is one pool")

    def default_choice(self):
        return Choice(place(Layout(ulysses=2), "cpu", "auto", ()))

    def live_placement(self, choice):
        return choice.placement

    def pool_for(self, choice):
        return self._client

    def parallelize(self, model, choice, left_open=None):
        self.choices.append(choice)
        return remote_patcher.parallelize(model, self._client, holds_ui_device=1.0)
