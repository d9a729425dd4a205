"""Python looks for garbage between a rank's evaluations, and nothing that they leave stays."""

import gc
import socket
import weakref
from types import SimpleNamespace

import pytest
from pipemesh.parallel_runtime.wire.arena import Arena
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.parallel_runtime.wire.messages import Close, Done, FromRank, Memory, ToRank
from pipemesh.parallel_runtime.worker.handler import Stand
from pipemesh.parallel_runtime.worker.rank_loop import ALLOWED, RankLoop, look_rarely

from ..kit.fake_pools import MAKE


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
def test_an_evaluation_is_not_held_up_and_what_it_leaves_is_gone_before_the_next(collections, kind):
    left = []

    def handle(request, segments, rank):
        assert not any(one() is not None for one in left), "the last one left it"
        collections.request = request.request
        cycle = Cycle()
        left.append(weakref.ref(cycle))
        kept = [[] for _ in range(ALLOWED // 2)]
        collections.request = None
        cycle.kept = kept
        return Done(request=request.request, memory=Memory(0, 0, 0))

    arena, (ours, theirs) = Arena(), socket.socketpair()
    ui, rank = Channel(ours, FromRank), Channel(theirs, ToRank)
    for number in (1, 2, 3):
        ui.send(MAKE[kind](number))
    ui.send(Close())
    loop = RankLoop(rank, arena.board, 0, SimpleNamespace(now=lambda: Memory(0, 0, 0)))
    loop.serve(SimpleNamespace(handle=handle, stand=lambda request: Stand()))
    assert [answer for answer, _ in ui.pump()] == [
        Done(request=number, memory=Memory(0, 0, 0)) for number in (1, 2, 3)
    ]
    assert collections.seen == [] and len(left) == 3
    for end in (ui, rank, arena):
        end.close()
