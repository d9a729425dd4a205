"""While ranks start, load or patch, the user is told so, in lines that change as they get ready."""

from dataclasses import replace

import pytest
from pipemesh.launcher.pool.pool import WorkerPool
from pipemesh.launcher.pool.progress import Progress
from pipemesh.parallel_runtime.errors import ModelError, RunCancelled

from .fake_pools import call, cpus, fake_setup, inside, opens


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr("pipemesh.launcher.pool.conversation.POLL_S", 0.01)
    return lines


@pytest.fixture
def pool(told):
    """(rule, ...) -> a pool of two fake ranks that is ready."""
    made = []

    def pool(*rules):
        made.append(WorkerPool(cpus(2), replace(fake_setup(*rules), tell=told.append)))
        made[-1].start()
        return made[-1]

    yield pool
    for one in made:
        one.close()


def test_the_start_of_workers_is_told_and_its_end(told, pool):
    pool("0:Start=slow")
    assert told[-2:] == ["PipeMesh: starting workers, 1 of 2 ready", "PipeMesh: workers are ready"]


@pytest.mark.parametrize(
    ("kind", "act", "done"),
    [("Load", "loading the model", "the model is loaded"), ("SetWeightPatches", "patching weights", "weights are patched")],
)
def test_what_takes_its_time_is_told_with_how_many_are_ready(told, pool, kind, act, done):
    made = pool(f"1:{kind}=slow")
    told.clear()
    call(made, kind)
    assert told[-2:] == [f"PipeMesh: {act}, 1 of 2 ready", f"PipeMesh: {done}"]
    assert len(set(told)) == len(told)


def test_evaluations_tell_nothing(told, pool):
    made = pool("*:Forward=slow")
    told.clear()
    call(made, "Forward")
    assert told == []


def test_a_load_that_fails_or_is_cancelled_is_not_told_to_be_done(told, pool):
    made = pool("*:Load=gated")
    told.clear()
    with pytest.raises(RunCancelled):
        call(made, "Load", inside(made, "loading"))
    call(made, "Forward", opens(made))
    assert "PipeMesh: the model is loaded" not in told
    refusing = pool("0:Load=error", "1:Load=slow")
    told.clear()
    with pytest.raises(ModelError):
        call(refusing, "Load")
    assert told == ["PipeMesh: loading the model, 1 of 2 ready"]


def test_a_line_is_told_once():
    lines = []
    progress = Progress(2, lines.append)
    for phases in (["loading"] * 2, ["loading"] * 2, ["loading"], ["computing"], []):
        progress.look(phases)
    progress.end()
    progress.end()
    assert lines == [
        "PipeMesh: loading the model, 0 of 2 ready",
        "PipeMesh: loading the model, 1 of 2 ready",
        "PipeMesh: the model is loaded",
    ]
