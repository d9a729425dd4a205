"""A runtime of auto mode with one pool, of two ranks."""

import json
from pathlib import Path

import pytest
import torch
from pipemesh.nodes.auto import decoding
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import FILE, SETTING, Switch
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.planning import PlannedLayout, Planning
from pipemesh.nodes.settings import Choice
from pipemesh.nodes.timing import StepTimes
from pipemesh.parallel_runtime.client import remote_patcher
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.planner.counts import Counts, count_nothing
from pipemesh.pool.devices import place
from pipemesh.pool.trial.host_trials import HostTrials, Verdicts


def no_trials():
    """Host trials that are turned off."""
    return HostTrials(Path(), "", None, Verdicts(Path()))


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
        self.planning = Planning(StepTimes(first_step=self.wait.came), Counts(count_nothing))

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


@pytest.fixture
def settings(tmp_path):
    """Sets the switch of auto mode, as ComfyUI does."""
    file = tmp_path / FILE

    def switch(on):
        file.write_text(json.dumps({"Comfy.Other": 1, SETTING: on}))

    switch.file = file
    return switch


@pytest.fixture
def switched(client, settings, monkeypatch):
    """Auto mode that takes a pool for whatever it saves of a VAE or an upscale model;
    ``switched(False)`` switches it off.
    """
    monkeypatch.setattr(decoding, "WORTH_S", 0.0)
    notices, runtime, times = Notices(), SharedRuntime(client), StepTimes()
    auto = Auto(lambda: runtime, Switch({}, lambda: settings.file), notices, times)
    settings.said = lambda: [one.text for one in notices.latest()]
    settings.runtime, settings.notices, settings.times = runtime, notices, times
    settings(True)
    auto.install()
    with torch.inference_mode():
        yield settings
    auto.remove()
