"""What the status costs and says, in one process and with runs made up: a page asks for it again
and again while a workflow runs.
"""

import pytest
from pipemesh.nodes.auto.mode import Auto
from pipemesh.nodes.auto.switch import Switch
from pipemesh.nodes.notices import Notices
from pipemesh.nodes.planning import PlannedLayout
from pipemesh.nodes.report.text import queue_text, text_of
from pipemesh.nodes.runtime import Runtime
from pipemesh.nodes.status.collection import MOST, status_of
from pipemesh.nodes.status.figures import QueueFigures
from pipemesh.nodes.timing import Stepped
from pipemesh.parallel_runtime.client.queue_lookahead import Images
from pipemesh.parallel_runtime.client.run import Evaluation, PooledModel, Queued, Run, RunNames
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.occupancy import Span

from ..kit.fake_pools import fake_setup

AUTO = Auto(lambda: None, Switch({"PIPEMESH_AUTO": "0"}, lambda: None), Notices())


class Counted(list):
    """Evaluations that count how many of them were looked at."""

    looked_at = 0

    def __iter__(self):
        for one in super().__iter__():
            Counted.looked_at += 1
            yield one


@pytest.fixture
def idle_runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPEMESH_CACHE", str(tmp_path))
    monkeypatch.setattr(Counted, "looked_at", 0)
    made = Runtime(fake_setup())
    yield made
    made._keeper.close()


MODEL = PooledModel("model", "model")


def pool_of(runtime, **degrees):
    return runtime._pool(runtime.choose(layout="by hand", **degrees).placement)


def ran(runtime, pool, number, *, ended=True, evaluations=50):
    """A run of so many evaluations, timed as one of a sampler's."""
    timed = Evaluation(0.1, 0.01, 0.01, 4, spans={0: Span(0, 0.1, 0.01), 1: Span(0, 0.1, 0.01)})
    run = Run(
        RunNames(number),
        MODEL,
        began_s=1000.0 + number,
        evaluations=Counted([timed] * evaluations),
        is_sampled=True,
    )
    run.ended_s = run.began_s + 5 if ended else 0.0
    pool.runs.recent.append(run)
    runtime.planning.times._runs[run] = (("a kind", number), 0.1)
    return run


def looked_at(runtime):
    """How many evaluations the next status looks at."""
    before = Counted.looked_at
    status_of(runtime, AUTO)
    return Counted.looked_at - before


def test_a_run_that_has_ended_is_summed_up_once_however_often_the_status_is_asked_for(idle_runtime):
    pools = [pool_of(idle_runtime, ulysses=2), pool_of(idle_runtime, pipefusion=2, ulysses=1)]
    for number in range(10):
        ran(idle_runtime, pools[number % 2], number)
    assert looked_at(idle_runtime) >= 10 * 50
    assert [looked_at(idle_runtime) for _ in range(5)] == [0] * 5
    assert status_of(idle_runtime, AUTO).last_runs[0].figures.evaluations == 50
    text_of(idle_runtime, None)
    assert looked_at(idle_runtime) == 0
    going_on = ran(idle_runtime, pools[0], 11, ended=False)
    assert 0 < looked_at(idle_runtime) == looked_at(idle_runtime), "what goes on changes"
    going_on.ended_s = 2000.0
    looked_at(idle_runtime)
    assert looked_at(idle_runtime) == 0


def test_no_more_runs_are_told_of_than_can_be_of_use_and_layouts_that_are_over_go_with_theirs(idle_runtime):
    old, new = pool_of(idle_runtime, ulysses=2), pool_of(idle_runtime, pipefusion=2, ulysses=1)
    pool_of(idle_runtime, ring=2, ulysses=1)  # asked for, and never started
    ran(idle_runtime, old, 0)
    assert [pool.layout for pool in status_of(idle_runtime, AUTO).pools] == ["ulysses 2 = 2 ranks"]
    for number in range(1, MOST):
        ran(idle_runtime, new, number)
    assert [pool.layout for pool in status_of(idle_runtime, AUTO).pools] == [
        "ulysses 2 = 2 ranks",
        "pipefusion 2 = 2 ranks",
    ]
    ran(idle_runtime, new, MOST)
    said = status_of(idle_runtime, AUTO)
    assert ([pool.layout for pool in said.pools], len(said.last_runs)) == (["pipefusion 2 = 2 ranks"], MOST)


def test_how_far_a_run_is_and_how_long_it_takes_still_is_told_and_why_it_ended_early(idle_runtime):
    pool = pool_of(idle_runtime, ulysses=2)
    run = ran(idle_runtime, pool, 1, ended=False)
    assert status_of(idle_runtime, AUTO).current_run.steps.total == 0
    idle_runtime.planning.times._stepped[run] = Stepped(1, 20)
    now = status_of(idle_runtime, AUTO).current_run.steps
    assert (now.done, now.total, now.left_s) == (1, 20, None)
    idle_runtime.planning.times._stepped[run] = Stepped(5, 20, 2.0)
    assert status_of(idle_runtime, AUTO).current_run.steps.left_s == 30.0
    pool.runs._sampled.append(run)
    MODEL.run = run
    lost = PoolFailed("Rank 1 on cpu was killed: run again.\nLast lines of rank 1:\n  its last words")
    run.note_fault(lost)
    pool.runs.end(MODEL)
    (ended,) = status_of(idle_runtime, AUTO).last_runs
    assert (ended.steps.done, ended.steps.total, ended.steps.left_s) == (5, 20, None)
    assert ended.steps.fault == "Rank 1 on cpu was killed: run again."


def test_a_queue_is_told_of_with_the_run_that_computed_it_and_with_no_later_one(idle_runtime, monkeypatch):
    pool = pool_of(idle_runtime, data=2, ulysses=1)
    computed, handed = ran(idle_runtime, pool, 1), ran(idle_runtime, pool, 2, evaluations=0)
    computed.queued, handed.queued = Queued(2, 8), Queued(0, 8)
    predicted = PlannedLayout(pool.layout, "by numbers", known="published", first_s=0.5, images=2)
    monkeypatch.setattr(PlannedLayout, "seconds", 0.8)
    idle_runtime.planning.note(computed, predicted)
    (told,) = status_of(idle_runtime, AUTO).last_runs
    assert told.steps.queue == QueueFigures(2, 8, 0.8, 0.5)
    assert queue_text(told.steps.queue, Images(used=3, dropped=1)).splitlines() == [
        "2 of 8 queued images at once. Sampled ahead so far: 3 used, 1 thrown away.",
        "Predicted: one evaluation of all these images takes 0.80 s (0.40 s an image), of the first image alone"
        " 0.50 s.",
    ]
    ran(idle_runtime, pool, 3)
    assert status_of(idle_runtime, AUTO).last_runs[0].steps.queue is None
    pool.runs.recent.pop()
    monkeypatch.setattr(type(pool.sessions), "live", object())
    assert idle_runtime.last_run()[2] is computed
