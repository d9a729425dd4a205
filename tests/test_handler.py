"""A rank's memory at the end of a run, seen with a model that holds nothing."""

from types import SimpleNamespace

import pytest
import torch
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.messages import EndRun, Memory
from pipemesh.parallel_runtime.worker.handler import RequestHandler


class Counted:
    """A rank's memory that counts what it is asked for."""

    def __init__(self):
        self.done = []

    def give_back(self):
        self.done.append("give back")

    def empty_cache(self):
        self.done.append("empty the GPU's cache")

    def now(self):
        return Memory(0, 0, 0)


@pytest.mark.parametrize(
    ("layout", "done"), [(Layout(ulysses=2), "empty the GPU's cache"), (Layout(pipefusion=2), "give back")], ids=["sequence", "stages"]
)
def test_only_stages_return_freed_memory_to_the_system_at_the_end_of_a_run(layout, done):
    """A sequence's ranks on CPUs need it again at the next run, which would wait for the system."""
    memory, ended = Counted(), []
    handler = RequestHandler(SimpleNamespace(rank=0, degrees=layout.degrees()), torch.device("cpu"), memory, None, away=False)
    handler.models["m"] = SimpleNamespace(method=SimpleNamespace(end_run=lambda: ended.append("m")))
    handler.handle(EndRun(request=1, model="m"), [], None)
    assert (ended, memory.done) == (["m"], [done])
