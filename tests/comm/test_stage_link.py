"""The link between stages over a transport that buffers nothing: whatever the order in which ranks
get to run, no stage waits for ever, and every patch comes out once, in the order of submission,
with what all stages made of it.
"""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipemesh.parallel_runtime.comm import stage_link as stages
from pipemesh.parallel_runtime.comm.stage_link import CHUNK_BYTES, IN_FLIGHT, StageLink
from pipemesh.parallel_runtime.layout import Layout

from ..kit.collectives import World

MOST_STEPS = 1_000_000  # of progress that a stage makes in one request


@dataclass
class Pipeline:
    """``sizes`` of patches, each one receive and one send of a stage. ``early``: by stage, those
    whose receive is posted while the one before is computed. ``window``: so many are in flight.
    """

    sizes: list
    early: list
    window: int
    came_out: list = field(default_factory=list)

    def run(self, choose, chunk_bytes=CHUNK_BYTES):
        """Returns the stages' links. ``choose``: which of those that can go on does so."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "CHUNK_BYTES", chunk_bytes)
            world = World(Layout(pipefusion=len(self.early)), "gloo", patch)
            for mesh in world.meshes:
                mesh.link.traffic.sent_bytes.clear()
            world.run(self.stage, choose)
            for rank, ticks in enumerate(world.ticks):
                assert bool(ticks) == (rank > 0), "only who waits for a stage tells so"
                assert all(steps > rank * MOST_STEPS for steps in ticks), "it looks as if it hung"
        return [mesh.link for mesh in world.meshes]

    def stage(self, mesh, run):
        stage, link = mesh.rank, mesh.link
        for number, size in enumerate(self.sizes):
            run.parent.switch(Submitted(self, number))
            hidden, after = torch.full((size,), float(number)), number + 1
            if stage:
                hidden = link.receive(number, size, torch.float32, stages.CPU)
                if after in self.early[stage] and Submitted(self, after).done:
                    link.expect(self.sizes[after] + 1, torch.float32, stages.CPU)
            hidden = hidden + 100 * (stage + 1)
            if stage < len(self.early) - 1:
                link.send(number, hidden)
            else:
                self.came_out.append(hidden)


@dataclass
class Submitted:
    """Whether the UI has asked for a patch yet."""

    pipeline: Pipeline
    number: int

    @property
    def done(self):
        return self.number < min(len(self.pipeline.sizes), len(self.pipeline.came_out) + self.pipeline.window)


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


@settings(deadline=None)
@given(PIPELINES, st.randoms(use_true_random=False), st.sampled_from([4, 12, CHUNK_BYTES]))
def test_no_stage_waits_for_ever_and_every_patch_comes_out_once_in_its_turn(pipeline, random, chunk_bytes):
    links = pipeline.run(random.choice, chunk_bytes)
    added = 100 * sum(range(1, len(links) + 1))
    assert [hidden.tolist() for hidden in pipeline.came_out] == [
        [number + added] * size for number, size in enumerate(pipeline.sizes)
    ]
    for link in links[:-1]:
        assert link.traffic.sent_bytes.total() == sum(4 * (size + 1) for size in pipeline.sizes)
        assert len(link._sends._sending) <= IN_FLIGHT


@settings(deadline=None, max_examples=20)
@given(PIPELINES, st.randoms(use_true_random=False))
def test_a_message_of_another_request_is_noticed(pipeline, random):
    real = StageLink.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLink, "send", lambda link, number, hidden, **how: real(link, number + 1, hidden))
        with pytest.raises(RuntimeError, match="out of step"):
            pipeline.run(random.choice)


def test_messages_are_shorter_than_what_transports_stall_at():
    assert CHUNK_BYTES < 64 << 20
    buffer = torch.empty(3 * CHUNK_BYTES // 2 + 1, dtype=torch.bfloat16)
    chunks = stages.chunks_of(buffer)
    assert max(chunk.nbytes for chunk in chunks) <= CHUNK_BYTES
    assert sum(chunk.nbytes for chunk in chunks) == buffer.nbytes
