"""From the start of a sampling until its first step, a user sees it go on: an event at once where
workers have to start, and then one every second, whatever ComfyUI's process does meanwhile.
"""

import threading
from types import SimpleNamespace

import pytest
from comfy_execution.utils import CurrentNodeContext
from pipemesh.nodes.waiting import BEAT_S, FIRST_BEAT_S, Waiting
from pipemesh.parallel_runtime.client.wait import waited_for
from pipemesh.pool.progress import Told

NODE = ("3", "a prompt")
LOADING = Told("PipeMesh: loading a model, 0 of 2 ready", 1, 4, "25 %")
LOADED = Told("PipeMesh: the model is loaded")


class Screen:
    def __init__(self):
        self.shown, self.ended, self.sampling = [], [], False
        self.show, self.is_sampling = self.shown.append, lambda node: self.sampling

    def note_bar(self, node):
        self.sampling = False

    def end(self, node, text):
        self.ended.append((node, text))


class Beats:
    """What the thread waits on: each wait passes, by this clock, when the test says so."""

    def __init__(self):
        self.seconds, self.asked, self._over = 0.0, [], False
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self):
        return self

    def clock(self):
        return self.seconds

    def wait(self, seconds):
        self.asked.append(seconds)
        self._waits.release()
        self._go.acquire()
        self.seconds += seconds
        return self._over

    def set(self):
        self._over = True
        self._go.release()

    def pass_one(self):
        """Lets the thread's wait pass; returns once it waits again, or has ended."""
        self._waits.acquire()
        self._go.release()
        self._waits.acquire()
        self._waits.release()


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def beats():
    return Beats()


@pytest.fixture
def waiting(screen, beats):
    """Of a sampling that has begun."""
    made = Waiting(screen, beats.clock, beats)
    with CurrentNodeContext("a prompt", "3"):
        made.begin()
        yield made
    made.end()


def test_there_is_an_event_within_a_second_and_then_one_every_second(waiting, screen, beats):
    for _ in range(4):
        beats.pass_one()
    assert [one.seconds for one in screen.shown] == [0.5, 1.5, 2.5, 3.5]
    assert max(beats.asked) <= BEAT_S and beats.asked[0] == FIRST_BEAT_S < 1
    assert {(one.node, one.prompt) for one in screen.shown} == {NODE}
    assert screen.shown[-1].text == "PipeMesh: sampling begins, 4 s"


def test_what_is_waited_for_is_shown_at_once_and_again_with_its_bar(waiting, screen, beats):
    assert waiting.tell(LOADING)
    beats.pass_one()
    assert [(one.text, one.done, one.total) for one in screen.shown] == [(f"{LOADING.line}, 0 s", 1, 4)] * 2


def test_bytes_that_change_often_are_not_shown_each_time(waiting, screen, beats):
    for done in range(100):
        waiting.tell(Told(LOADING.text, done, 100))
    assert len(screen.shown) == 1


def test_what_is_done_is_told_once_and_then_that_the_first_step_is_waited_for(waiting, screen, beats):
    waiting.tell(LOADING)
    waiting.tell(LOADED)
    for _ in range(2):
        beats.pass_one()
    texts = ["the model is loaded, 0 s", "the first step, 0 s", "the first step, 2 s"]
    assert [one.text for one in screen.shown[1:]] == [f"PipeMesh: {text}" for text in texts]


CAME = [("3", "PipeMesh: the first step came after 7 s")]


def test_it_ends_with_the_samplers_first_step_and_leaves_a_line_that_stays_true(waiting, screen, beats):
    waiting.tell(LOADING)
    screen.sampling, beats.seconds = True, 7.0
    assert not waiting.tell(LOADED)
    assert screen.ended == CAME and len(screen.shown) == 1
    assert not waiting.tell(LOADING), "what is waited for amid a sampling has no bar of its own"


def test_a_first_step_that_comes_without_a_bar_is_told_as_one_that_came(waiting, screen, beats):
    waiting.tell(LOADING)
    beats.seconds = 7.0
    waiting.came()
    waiting.end()
    assert screen.ended == CAME


def test_how_a_run_is_sampled_stays_on_the_node_and_a_short_wait_shows_nothing(waiting, screen):
    waiting.end()
    assert not screen.shown and not screen.ended
    waiting.begin()
    waiting.tell(Told("PipeMesh samples in patches, free-running.", stays=True))
    waiting.end()
    assert screen.ended == [("3", "PipeMesh samples in patches, free-running.")]


def test_a_second_model_of_the_same_node_does_not_begin_it_anew_and_another_node_does(waiting, screen, beats):
    beats.pass_one()
    waiting.begin()
    waiting.tell(LOADING)
    assert screen.shown[-1].seconds == 0.5
    with CurrentNodeContext("a prompt", "7"):
        waiting.begin()
    waiting.tell(LOADING)
    assert screen.shown[-1].node == "7"
    assert screen.ended == [("3", "PipeMesh: the wait for a first step is over, after 0 s")]


def test_outside_a_node_nothing_is_waited_for(screen, beats):
    waiting = Waiting(screen, beats.clock, beats)
    waiting.begin()
    assert not waiting.tell(LOADING)


def test_preparing_a_sampling_begins_the_wait_and_ends_it_where_that_fails():
    said = []
    wait = SimpleNamespace(begin=lambda: said.append("begin"), end=lambda: said.append("end"))
    model = SimpleNamespace(remote=SimpleNamespace(pool=SimpleNamespace(wait=wait)))
    assert waited_for(lambda executor, model, shape: shape)(None, model, (1,)) == (1,)
    assert said == ["begin"]

    @waited_for
    def cancelled(executor, model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled(None, model)
    assert said == ["begin", "begin", "end"]
