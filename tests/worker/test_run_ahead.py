"""A rank on a GPU enqueues the next patch or evaluation while the GPU computes: nothing between two
of them waits for it, and answers go out in order when it has come so far.

The rank's own loop and handler run in this process, on a GPU that is not there.
"""

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.dry_run.device import dry_device
from pipemesh.lab.dry_run.ranks import TURN, joined
from pipemesh.parallel_runtime.comm.device_copies import Reached
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.planner.dry_device import DEVICE
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
from pipemesh.parallel_runtime.wire.tree import encode_tree
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler
from pipemesh.parallel_runtime.worker.rank_loop import AHEAD, RankLoop
from torch._subclasses.fake_tensor import FakeTensorMode

from ..kit.joint_model import PLAN, Model, inputs

PATCHES = ((0, 4, False), (4, 4, False), (8, 5, True))
LAYOUTS = [Layout(ulysses=2, ring=2), Layout(ulysses=2, pipefusion=2)]


class Gpu:
    """When the GPU comes to what: events of one queue. ``reached``: of how many. ``early``: waits
    for one behind which it has nothing to multiply, and no other.
    """

    def __init__(self, patch, counts):
        self.recorded, self.reached, self.early = 0, 0, 0
        self.on_wait = lambda: None
        gpu = self

        class Event:
            def __init__(self, *_, **__):
                self.place, self.flops = 0, 0

            def record(self):
                gpu.recorded += 1
                self.place, self.flops = gpu.recorded, counts.flops

            def query(self):
                return self.place <= gpu.reached

            def synchronize(self):
                gpu.on_wait()
                gpu.early += (self.place, self.flops) == (gpu.recorded, counts.flops)
                gpu.reached = max(gpu.reached, self.place)

            def elapsed_time(self, other):
                assert self.query() and other.query(), "asked before the GPU had come so far"
                return 1e3 * (other.place - self.place)

        patch.setattr(torch.cuda, "Event", Event)


class NoMemory(DeviceMemory):
    def __init__(self):
        super().__init__(torch.device("cpu"), 0)

    def now(self):
        return Memory(0, 0, 0)

    recent = now

    def give_back(self): ...
    def empty_cache(self): ...
    def little(self): ...
    def reserve(self, nbytes): ...


class Rank:
    """One rank of ``layout`` in this process. ``log``: what it did, in order."""

    def __init__(self, mesh, mode, clocked=False):
        self.arena = Arena()
        self.log = []
        ours, theirs = socket.socketpair()
        self.ui, channel = Channel(ours, FromRank), Channel(theirs, ToRank)
        self.loop = RankLoop(channel, self.arena.board, mesh.rank, NoMemory(), DEVICE)
        self.handler = RequestHandler(mesh, DEVICE, NoMemory(), ArenaIO(self.arena.segment, DEVICE))
        self.send, channel.send = channel.send, self._sent
        with dry_device(mode), DEVICE:
            model = Model(4)
        stages = () if clocked or mesh.link is None else (2, 2)
        self.method = make_method(model, PLAN, mesh, self.loop, stages)
        self.method.attach()
        held = {
            "method": self.method,
            "patches_id": "",
            "on_rank": self._evaluate,
            "model": model,
            "kept": None,
            "recordings": None,
        }
        self.handler.models["m"] = SimpleNamespace(**held)
        self._model = model

    def _sent(self, message, fds=()):
        self.log.append(("answered", message.request))
        self.send(message, fds)

    def _evaluate(self, arguments, number):
        self.log.append(("enqueues", number // TURN))
        try:
            return self.method.forward(self._model, arguments, number)
        finally:
            self.log.append(("enqueued", number // TURN))

    def ask(self, parts):
        """Forwards of all parts, with arguments in the arena."""
        frame = self.arena.frame().__enter__()
        tree = encode_tree(inputs(5), lambda path, tensor: frame.put(tensor))
        for number, part in enumerate(parts, 1):
            out = frame.blank(1 << 16)
            forward = {
                "model": "m",
                "patches_id": "",
                "arguments": tree,
                "out": out,
                "part": part,
            }
            self.ui.send(Forward(request=TURN * number, **forward))

    def answers(self):
        """What it said until it ended."""
        said = []
        while len(said) < len([one for one in self.log if one[0] == "answered"]):
            said.append(self.ui.receive()[0])
        return said


@pytest.fixture
def mode():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture
def served(mode, monkeypatch):
    """layout, rank, parts -> the rank after it has answered all, the counts, and the GPU."""

    def serve(layout, rank, parts, *, last=(), prepare=lambda rank, gpu: None, clocked=False):
        with joined(layout, rank) as mesh:
            made = Rank(mesh, mode, clocked)
            made.ask(parts)
            for message in (*last, Close()):
                made.ui.send(message)
            with dry_device(mode) as counts:
                gpu = Gpu(monkeypatch, counts)
                prepare(made, gpu)
                made.loop.serve(made.handler)
        return made, counts, gpu

    return serve


def parts_of(layout, runs=2):
    """Every patch twice after the first, whole evaluation; or two prompts twice."""
    if layout.pipefusion > 1:
        return [Part(1, 0), *(Part(1, 0, patch) for _ in range(runs) for patch in PATCHES)]
    return [Part(1, branch) for _ in range(runs) for branch in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.equation)
def test_from_reading_the_inputs_to_the_answer_no_call_waits_for_the_gpu(served, layout):
    for rank in {0, layout.writer}:
        parts = parts_of(layout)
        made, counts, gpu = served(layout, rank, parts)
        assert counts.waits == {} and gpu.early <= 1, "for the last answer"
        said = made.answers()
        assert [(type(one), one.request) for one in said] == [
            (Done, TURN * number) for number in range(1, len(parts) + 1)
        ], said
        assert all(bool(one.output) == (rank == layout.writer) for one in said)


@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(pipefusion=2)], ids=Layout.equation)
def test_the_next_one_is_enqueued_before_the_gpu_has_come_to_the_end_of_the_last_and_no_more_than_that(
    served, monkeypatch, layout
):
    monkeypatch.setattr(Reached, "is_over", lambda self: False)  # a GPU that is slower than this process
    made, _, _ = served(layout, layout.writer, parts_of(layout))
    done = dict(zip(made.log, range(len(made.log)), strict=True))
    numbers = [number for what, number in made.log if what == "enqueues"]
    assert len(numbers) >= 4
    for number in numbers:
        if ("enqueues", number + 1) in done:
            assert done["enqueues", number + 1] < done["answered", TURN * number], "it ran ahead"
        if ("enqueues", number + AHEAD) in done:
            assert done["enqueues", number + AHEAD] > done["answered", TURN * number], (
                "a cancel would wait for them all"
            )


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=Layout.equation)
def test_while_a_rank_waits_for_its_gpu_what_that_computes_counts_as_progress(served, monkeypatch, layout):
    """A GPU that computes for longer than the stall time is not one that hangs."""
    monkeypatch.setattr("pipemesh.parallel_runtime.worker.trail.EVERY", 1)
    counted = []

    def prepare(rank, gpu):
        def looked_at():
            if ("enqueued", 1) in rank.log:
                counted.append(rank.arena.board.progress(0))

        gpu.on_wait = looked_at

    made, _, _ = served(layout, 0, parts_of(layout)[:1], prepare=prepare)
    assert [type(one) for one in made.answers()] == [Done]
    assert len(counted) > 2, "the end alone is waited for"
    assert counted == sorted(set(counted)), "a place that was come to did not count"


def test_what_the_gpu_has_computed_is_answered_while_the_next_one_is_enqueued(served):
    """An answer that waited until the next patch is enqueued would come a patch late."""

    def prepare(rank, gpu):
        evaluate = rank.method.forward

        def with_gpu_at_its_heels(*args):
            gpu.reached = gpu.recorded
            return evaluate(*args)

        rank.method.forward = with_gpu_at_its_heels

    layout = Layout(pipefusion=2)
    made, _, _ = served(layout, layout.writer, parts_of(layout), prepare=prepare)
    for number in range(1, len(parts_of(layout))):
        place = made.log.index(("enqueues", number + 1))
        assert made.log[place + 1 : place + 3] == [("answered", TURN * number), ("enqueued", number + 1)], (
            made.log
        )


def test_a_request_of_another_kind_waits_until_the_gpu_has_computed_all(served, monkeypatch):
    monkeypatch.setattr(Reached, "is_over", lambda self: False)
    layout = Layout(ulysses=2)
    made, _, _ = served(layout, 0, parts_of(layout), last=[EndRun(request=9999, model="m")])
    assert made.log[-1] == ("answered", 9999)
    assert [number for what, number in made.log if what == "answered"] == [
        TURN,
        2 * TURN,
        3 * TURN,
        4 * TURN,
        9999,
    ]


def test_an_error_that_the_gpu_tells_late_is_answered_to_the_request_that_it_is_of(served):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def prepare(rank, gpu):
        handle = rank.handler.handle

        def handled(request, *args):
            answer = handle(request, *args)
            return replace(answer, answer=fail) if request.request == 2 * TURN else answer

        rank.handler.handle = handled

    layout = Layout(pipefusion=2)
    made, _, _ = served(layout, layout.writer, parts_of(layout)[:3], prepare=prepare)
    said = made.answers()
    assert [type(one) for one in said] == [Done, Failed, Done]
    assert (said[1].request, said[1].at) == (2 * TURN, None) and "illegal memory access" in said[1].text


@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(pipefusion=2)], ids=Layout.equation)
def test_an_error_that_the_gpu_tells_when_it_is_looked_at_is_an_answer(served, layout):
    """While the next one is enqueued, and before the next message. It tells it only then."""

    def prepare(rank, gpu):
        query = torch.cuda.Event.query

        def failing(event):
            if gpu.recorded:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return query(event)

        torch.cuda.Event.query = failing

    parts = parts_of(layout)[:3]
    made, _, _ = served(layout, layout.writer, parts, prepare=prepare)
    said = made.answers()
    assert [one.request for one in said] == [TURN * number for number in range(1, len(parts) + 1)], (
        "one answer each, in order"
    )
    assert isinstance(said[0], Failed) and "illegal memory access" in said[0].text


def test_blocks_are_timed_without_waiting_and_read_when_the_gpu_has_computed_them(served):
    layout = Layout(pipefusion=2)
    made, counts, _ = served(layout, 0, parts_of(layout), clocked=True)
    assert counts.waits == {}
    whole, *patches = made.answers()
    assert whole.block_s == {} and all(set(one.block_s) == {0, 1} for one in patches)
    assert all(seconds > 0 for one in patches for seconds in one.block_s.values())
