"""The link between stages over a transport that buffers nothing: whatever the order in which ranks
get to run, no stage waits for ever, and every patch comes out once, in the order of submission,
with what all stages made of it.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from greenlet import getcurrent, greenlet
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.comm import stage_link as stages
from pipemesh.parallel_runtime.comm.stage_link import CHUNK_BYTES, IN_FLIGHT, StageLink


class Work:
    def __init__(self):
        self.done = False

    def wait(self):
        while not self.done:
            getcurrent().parent.switch(self)


class Network:
    """A send is done when the other end has taken it, and not before. Called as torch.distributed,
    from a stage's greenlet.
    """

    def __init__(self):
        self._sends = defaultdict(deque)
        self._receives = defaultdict(deque)

    def isend(self, chunk, to, group):
        return self._post(self._sends, (getcurrent().stage, to), chunk)

    def irecv(self, chunk, sender, group):
        return self._post(self._receives, (sender, getcurrent().stage), chunk)

    def _post(self, queues, ends, chunk):
        work = Work()
        queues[ends].append((work, chunk))
        while self._sends[ends] and self._receives[ends]:
            (sent, source), (received, place) = self._sends[ends].popleft(), self._receives[ends].popleft()
            place.copy_(source)
            sent.done = received.done = True
        return work


class StageRun(greenlet):
    """What a stage does with its link: for every patch one receive and one send. ``early``: the
    patches whose receive is posted while the one before is computed.
    """

    def __init__(self, pipeline, stage):
        super().__init__(self._run)
        self.stage = stage
        self._pipeline = pipeline
        last = len(pipeline.early) - 1
        self.link = StageLink(stage - 1 if stage else None, stage + 1 if stage < last else None, via_cpu=True)

    def _run(self):
        pipeline, link = self._pipeline, self.link
        for number, size in enumerate(pipeline.sizes):
            self.parent.switch(Submitted(pipeline, number))
            hidden = torch.full((size,), float(number))
            if self.stage:
                hidden = link.receive(number, size, torch.float32, torch.device("cpu"))
            if (
                self.stage
                and number + 1 in pipeline.early[self.stage]
                and Submitted(pipeline, number + 1).done
            ):
                link.expect(pipeline.sizes[number + 1] + 1, torch.float32, torch.device("cpu"))
            hidden = hidden + 100 * (self.stage + 1)
            if self.stage < len(pipeline.early) - 1:
                link.send(number, hidden)
            else:
                pipeline.came_out.append(hidden)


@dataclass
class Submitted:
    """Whether the UI has asked for a patch yet: it has ``window`` of them in flight at most."""

    pipeline: "Pipeline"
    number: int

    @property
    def done(self):
        return self.number < min(len(self.pipeline.sizes), len(self.pipeline.came_out) + self.pipeline.window)


class Pipeline:
    def __init__(self, sizes, early, window):
        self.sizes, self.early, self.window = sizes, early, window
        self.came_out = []

    def run(self, choose):
        """Returns the stages. ``choose``: which of those that can go on does so."""
        runs = [StageRun(self, stage) for stage in range(len(self.early))]
        waits_for = {run: run.switch() for run in runs}
        while going := [run for run in runs if not run.dead]:
            ready = [run for run in going if waits_for[run].done]
            assert ready, "every stage waits for another"
            run = choose(ready)
            waits_for[run] = run.switch()
        return runs


def test_a_stage_before_that_has_no_rows_is_not_taken_for_one_that_is_not_there(monkeypatch):
    """As in a dry run, in which nothing arrives."""
    sent, work = deque(), SimpleNamespace(wait=lambda: None)

    def arrives(place, *_ends):
        message = sent.popleft()
        assert place.shape == message.shape, "it takes another message than was announced"
        place.copy_(message)
        return work

    monkeypatch.setattr(stages.dist, "isend", lambda message, *_ends: sent.append(message) or work)
    monkeypatch.setattr(stages.dist, "irecv", arrives)
    StageLink(None, 1, via_cpu=True).send(7, torch.empty(0), is_announced=True)
    rows = StageLink(0, None, via_cpu=True).receive(7, 5, torch.float32, stages.CPU, is_announced=True)
    assert rows.shape == (0,)


PIPELINES = st.integers(2, 4).flatmap(
    lambda count: st.builds(
        Pipeline,
        sizes=st.lists(st.integers(0, 7), min_size=1, max_size=16),
        early=st.lists(st.sets(st.integers(1, 15)), min_size=count, max_size=count),
        window=st.integers(1, 9),
    )
)


def over_a_network(pipeline, choose, chunk_bytes=CHUNK_BYTES):
    network = Network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.dist, "isend", network.isend)
        patch.setattr(stages.dist, "irecv", network.irecv)
        patch.setattr(stages, "CHUNK_BYTES", chunk_bytes)
        return pipeline.run(choose)


@settings(deadline=None)
@given(PIPELINES, st.randoms(use_true_random=False), st.sampled_from([4, 12, CHUNK_BYTES]))
def test_no_stage_waits_for_ever_and_every_patch_comes_out_once_in_its_turn(pipeline, random, chunk_bytes):
    runs = over_a_network(pipeline, random.choice, chunk_bytes)
    added = 100 * sum(range(1, len(runs) + 1))
    assert [hidden.tolist() for hidden in pipeline.came_out] == [
        [number + added] * size for number, size in enumerate(pipeline.sizes)
    ]
    for run in runs[:-1]:
        assert run.link.traffic.sent_bytes.total() == sum(4 * (size + 1) for size in pipeline.sizes)
        assert len(run.link._sends._sending) <= IN_FLIGHT


@settings(deadline=None)
@given(PIPELINES, st.randoms(use_true_random=False))
def test_a_message_of_another_request_is_noticed(pipeline, random):
    real = StageLink.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLink, "send", lambda link, number, hidden, **how: real(link, number + 1, hidden))
        with pytest.raises(RuntimeError, match="out of step"):
            over_a_network(pipeline, random.choice)


def test_messages_are_shorter_than_what_transports_stall_at():
    assert CHUNK_BYTES < 64 << 20
    buffer = torch.empty(3 * CHUNK_BYTES // 2 + 1, dtype=torch.bfloat16)
    chunks = stages.chunks_of(buffer)
    assert max(chunk.nbytes for chunk in chunks) <= CHUNK_BYTES
    assert sum(chunk.nbytes for chunk in chunks) == buffer.nbytes
