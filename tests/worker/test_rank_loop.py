"""A rank's loop: on a GPU it enqueues the next patch or evaluation while the GPU computes, and
answers go out in order when it has come so far. Between evaluations Python looks for garbage.

The loop runs in this process, on a GPU that is not there.
"""

import gc
import socket
import weakref
from types import SimpleNamespace

import pytest
import torch
from pipemesh.parallel_runtime.comm.device_copies import Reached
from pipemesh.parallel_runtime.methods.pipefusion.clock import BlockClock, block_seconds
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.parallel_runtime.wire.messages import (
    Close,
    Done,
    EndRun,
    Failed,
    Forward,
    FromRank,
    Memory,
    ToRank,
)
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import Enqueued, Stand
from pipemesh.parallel_runtime.worker.rank_loop import AHEAD, ALLOWED, RankLoop, look_rarely

from ..kit.fake_pools import MAKE

GPU = torch.device("cuda")
BLOCKS = 4
ILLEGAL = "CUDA error: an illegal memory access was encountered"
NOTHING = Memory(0, 0, 0)


class EventQueue:
    """When the GPU comes to what: events of one queue. ``reached``: of how many. ``on_wait``: is
    called when somebody waits for one.
    """

    def __init__(self, patch):
        self.recorded, self.reached = 0, 0
        self.on_wait = lambda: None
        queue = self

        class Event:
            def __init__(self, *_, **__):
                self.place = 0

            def record(self):
                queue.recorded += 1
                self.place = queue.recorded

            def query(self):
                return self.place <= queue.reached

            def synchronize(self):
                queue.on_wait()
                queue.reached = max(queue.reached, self.place)

            def elapsed_time(self, other):
                assert self.query() and other.query(), "asked before the GPU had come so far"
                return 1e3 * (other.place - self.place)

        patch.setattr(torch.cuda, "Event", Event)


class Handler:
    """Enqueues evaluations of some blocks. ``log``: what the rank did, in order; ``fails``: the
    request whose output the GPU cannot copy.
    """

    def __init__(self, log, gpu):
        self.log, self.gpu, self.fails, self.is_followed = log, gpu, 0, False

    def stand(self, request):
        return Stand((3, 77))

    def handle(self, request, segments, rank):
        number = request.request
        if not isinstance(request, Forward):
            return Done(request=number, memory=NOTHING)
        self.log.append(("enqueues", number))
        for _ in range(BLOCKS):
            if self.is_followed:  # the GPU is at this process's heels
                self.gpu.reached = self.gpu.recorded
            rank.tick()
        self.log.append(("enqueued", number))

        def answer():
            if number == self.fails:
                raise RuntimeError(ILLEGAL)
            return Done(request=number, memory=NOTHING)

        return Enqueued(request, Reached(GPU), answer, self.stand(request))


@pytest.fixture
def served(monkeypatch):
    """Requests -> what a rank answered and did, after it has answered all."""

    def serve(*requests, prepare=lambda handler, gpu, board: None, handle=None, device=GPU):
        gpu, arena, log = EventQueue(monkeypatch), Arena(), []
        ours, theirs = socket.socketpair()
        ui, channel = Channel(ours, FromRank), Channel(theirs, ToRank)
        send = channel.send
        monkeypatch.setattr(
            channel, "send", lambda answer: (log.append(("answered", answer.request)), send(answer))
        )
        handler = Handler(log, gpu)
        handler.handle = handle or handler.handle
        memory = SimpleNamespace(now=lambda: NOTHING, is_dead=DeviceMemory(torch.device("cpu"), 0).is_dead)
        prepare(handler, gpu, arena.board)
        for request in (*requests, Close()):
            ui.send(request)
        RankLoop(channel, arena.board, 0, memory, device).serve(handler)
        said = [answer for answer, _ in ui.pump()]
        for end in (ui, channel, arena):
            end.close()
        return said, log

    return serve


def forwards(count):
    return [MAKE["Forward"](number) for number in range(1, count + 1)]


@pytest.fixture
def slow_gpu(monkeypatch):
    """A GPU that is slower than this process."""
    monkeypatch.setattr(Reached, "is_over", lambda self: False)


def test_the_next_one_is_enqueued_before_the_gpu_has_come_to_the_end_of_the_last_and_no_more_than_that(
    served, slow_gpu
):
    said, log = served(*forwards(5))
    assert [(type(one), one.request) for one in said] == [(Done, number) for number in range(1, 6)]
    place = {event: at for at, event in enumerate(log)}
    for number in range(1, 5):
        assert place["enqueues", number + 1] < place["answered", number], "it ran ahead"
        if number + AHEAD < 6:  # else a cancel would wait for them all
            assert place["enqueues", number + AHEAD] > place["answered", number]


def test_while_a_rank_waits_for_its_gpu_what_that_computes_counts_as_progress(served, monkeypatch):
    """A GPU that computes for longer than the stall time is not one that hangs."""
    monkeypatch.setattr("pipemesh.parallel_runtime.worker.trail.EVERY", 1)
    counted = []

    def prepare(handler, gpu, board):
        gpu.on_wait = lambda: counted.append(board.progress(0))

    said, _ = served(*forwards(1), prepare=prepare)
    assert [type(one) for one in said] == [Done]
    assert len(counted) > 2, "the end alone is waited for"
    assert counted == sorted(set(counted)), "a place that was come to did not count"


def test_what_the_gpu_has_computed_is_answered_while_the_next_one_is_enqueued(served):
    """An answer that waited until the next patch is enqueued would come a patch late."""

    def prepare(handler, gpu, board):
        handler.is_followed = True

    _, log = served(*forwards(4), prepare=prepare)
    for number in range(1, 4):
        place = log.index(("enqueues", number + 1))
        assert log[place + 1 : place + 3] == [("answered", number), ("enqueued", number + 1)], log


def test_a_request_of_another_kind_waits_until_the_gpu_has_computed_all(served, slow_gpu):
    said, log = served(*forwards(4), EndRun(request=9, model="m"))
    assert log[-1] == ("answered", 9) and [one.request for one in said] == [1, 2, 3, 4, 9]


def test_an_error_that_the_gpu_tells_late_is_answered_to_the_request_that_it_is_of(served):
    def prepare(handler, gpu, board):
        handler.fails = 2

    said, _ = served(*forwards(3), prepare=prepare)
    assert [type(one) for one in said] == [Done, Failed, Done]
    assert (said[1].request, said[1].at) == (2, None) and ILLEGAL in said[1].text


def test_an_error_that_the_gpu_tells_when_it_is_looked_at_is_an_answer(served):
    """While the next one is enqueued, and before the next message. It tells it only then."""

    def prepare(handler, gpu, board):
        def failing(event):
            raise RuntimeError(ILLEGAL)

        torch.cuda.Event.query = failing

    said, _ = served(*forwards(3), prepare=prepare)
    assert [one.request for one in said] == [1, 2, 3], "one answer each, in order"
    assert isinstance(said[0], Failed) and ILLEGAL in said[0].text


def test_blocks_are_timed_without_waiting_and_read_when_the_gpu_has_computed_them(monkeypatch):
    gpu, clock, waits = EventQueue(monkeypatch), BlockClock(), []
    gpu.on_wait = lambda: waits.append(True)
    times = clock.start(Part(1, 0, (0, 4, False)))
    for block in (0, 0, 1, 1):
        clock.note(block, GPU)
    assert not waits and gpu.reached == 0
    with pytest.raises(AssertionError, match="before the GPU had come so far"):
        block_seconds(times)
    gpu.reached = gpu.recorded
    assert block_seconds(times) == {0: 1.0, 1: 1.0}


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def collections():
    """Which requests Python looked for garbage in."""
    before, amid = gc.get_threshold(), SimpleNamespace(request=None, seen=[])
    note = lambda phase, info: amid.seen.append(amid.request) if phase == "start" and amid.request else None  # noqa: E731
    look_rarely()
    gc.callbacks.append(note)
    yield amid
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


@pytest.mark.parametrize("kind", ["Forward", "Release"])
def test_an_evaluation_is_not_held_up_and_what_it_leaves_is_gone_before_the_next(served, collections, kind):
    left = []

    def handle(request, segments, rank):
        assert not any(one() is not None for one in left), "the last one left it"
        collections.request = request.request
        cycle = Cycle()
        left.append(weakref.ref(cycle))
        kept = [[] for _ in range(ALLOWED // 2)]
        collections.request = None
        cycle.kept = kept
        return Done(request=request.request, memory=NOTHING)

    requests = [MAKE[kind](number) for number in (1, 2, 3)]
    said, _ = served(*requests, handle=handle, device=torch.device("cpu"))
    assert said == [Done(request=number, memory=NOTHING) for number in (1, 2, 3)]
    assert collections.seen == [] and len(left) == 3
