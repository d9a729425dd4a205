"""While ranks start, load or patch, the user is told so, in lines that change as they get ready."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from pipemesh.parallel_runtime.client.residency import title_in
from pipemesh.parallel_runtime.errors import ModelError, RunCancelled
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.messages import Load
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.progress import Progress, Told

from ..kit.fake_pools import call, cpus, fake_setup, gate, inside, opens


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr("pipemesh.pool.conversation.POLL_S", 0.01)
    return lines


@pytest.fixture
def pool(told):
    """(rule, ...) -> a pool of two fake ranks that is ready; a gated rank waits until the other is
    told to be ready.
    """
    made = []

    def pool(*rules):
        made.append(WorkerPool(cpus(2), replace(fake_setup(*rules), tell=lambda one: told.append(one.line))))
        made[-1].start(goes_on(made[-1], told))
        gate(made[-1]).fill_(0)  # which a slow start may have opened
        return made[-1]

    yield pool
    for one in made:
        one.close()


def goes_on(pool, told):
    """An ``interrupted`` that opens the gate once one rank was told to be ready, and says no."""
    return lambda: any("1 of 2 ready" in line for line in told) and opens(pool)()


def test_the_start_of_workers_is_told_and_its_end(told, pool):
    pool("0:Start=gated")
    assert told[-2:] == ["PipeMesh: starting workers, 1 of 2 ready", "PipeMesh: workers are ready"]


@pytest.mark.parametrize(
    ("kind", "rules", "act", "done"),
    [
        ("Load", ["1:Load=gated"], "loading the model", "PipeMesh: the model is loaded"),
        (
            "SetWeightPatches",
            ["1:SetWeightPatches=gated"],
            "patching weights",
            "PipeMesh: weights are patched",
        ),
        ("Load", ["0:Load=error", "1:Load=gated"], "loading the model", ""),  # what fails is not done
    ],
)
def test_what_takes_its_time_is_told_with_how_many_are_ready(told, pool, kind, rules, act, done):
    made = pool(*rules)
    told.clear()
    with nullcontext() if done else pytest.raises(ModelError):
        call(made, kind, goes_on(made, told))
    assert told[-2:] == [f"PipeMesh: {act}, 1 of 2 ready", done]
    assert len(set(told)) == len(told)


def test_a_load_that_is_cancelled_is_not_told_to_be_done_and_the_next_request_waits_for_it_openly(told, pool):
    made = pool("*:Load=gated")
    told.clear()
    with pytest.raises(RunCancelled):
        call(made, "Load", lambda: len(told) > 0)
    assert told[-1] == ""
    call(made, "Release", lambda: len(told) > 2 and opens(made)())
    assert told[-2:] == ["PipeMesh: loading the model, 0 of 2 ready", "PipeMesh: the model is loaded"]


def test_what_was_stopped_and_is_still_computed_is_waited_for_openly(told, pool, monkeypatch):
    monkeypatch.setattr("pipemesh.pool.conversation.CANCEL_WAIT_S", 0.1)
    made = pool("*:Forward=gated")
    told.clear()
    with pytest.raises(RunCancelled):
        call(made, "Forward", inside(made, "computing"))
    call(made, "Release", lambda: len(told) > 0 and opens(made)())
    assert "PipeMesh: waiting for the stopped run to end, 0 of 2 ready" in told
    assert told[-1] == "PipeMesh: workers are ready"


def test_a_line_is_told_once():
    lines = []
    progress = Progress(2, lambda one: lines.append(one.line), Arena().board)
    for phases in (["loading"] * 2, ["loading"] * 2, ["loading"], ["computing"], []):
        progress.look(phases)
    progress.end()
    progress.end()
    assert lines == [
        "PipeMesh: loading the model, 0 of 2 ready",
        "PipeMesh: loading the model, 1 of 2 ready",
        "PipeMesh: the model is loaded",
    ]


def test_a_load_says_which_model_and_how_many_bytes_of_how_many_and_a_bar_can_be_drawn(told):
    everything = []
    made = WorkerPool(cpus(2), replace(fake_setup("1:Load=half_done"), tell=everything.append))
    try:
        made.start()
        gate(made).fill_(0)
        everything.clear()

        def once_half_is_told():
            return bool(everything and everything[-1].done) and opens(made)()

        number = made.next_request()
        made.ask(Load(request=number, model="m", source=b"", title="flux.safetensors"), (), once_half_is_told)
    finally:
        made.close()
    half = Told("PipeMesh: loading flux.safetensors, 1 of 2 ready", 1 << 30, 2 << 30, "50 % of 2.0 GiB")
    assert everything[-2:] == [half, Told("PipeMesh: the model is loaded")]
    assert half.line == "PipeMesh: loading flux.safetensors, 1 of 2 ready (50 % of 2.0 GiB)"


def test_stages_that_are_cut_anew_are_told_with_their_blocks():
    assert title_in("flux.safetensors", (20, 37)) == "flux.safetensors into stages of 20, 37 blocks"
    assert title_in("flux.safetensors", ()) == "flux.safetensors"
