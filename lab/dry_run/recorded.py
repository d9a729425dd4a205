"""What the CPU of a rank starts when it replays an evaluation that was recorded as CUDA graphs. A
graph of the device that is not there has nothing in it, and counts that it is started.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch

from ...parallel_runtime.methods.method import Method
from ...parallel_runtime.methods.recordings import Recordings
from ...parallel_runtime.patches import Part
from ...parallel_runtime.planner.dry_device import DeviceCounts, Driver
from .device import AskedOfTorch

WARM_UP = Part(1, 0)


@dataclass(frozen=True)
class ReplayCalls:
    """What the CPU does for one evaluation: ``graph_launches``, ``messages``, and by name what it
    does between them, ``eager``. ``pieces`` are what the evaluation is cut into. ``unrecorded``:
    why it is not recorded; then there is nothing else.
    """

    pieces: int = 0
    graph_launches: int = 0
    messages: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)
    unrecorded: str = ""


class CountedGraph:
    """Stands for a CUDA graph. ``starts``: the graphs that are started."""

    def __init__(self, starts: list[CountedGraph]):
        self._starts = starts

    def capture_begin(self, **_: Any) -> None: ...
    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self._starts.append(self)


class RecordingDriver(Driver):
    """The parts of torch.cuda that a recording calls besides. A stream is one as well."""

    def __init__(self) -> None:
        self.starts: list[CountedGraph] = []

    def CUDAGraph(self) -> CountedGraph:
        return CountedGraph(self.starts)

    def Stream(self) -> RecordingDriver:
        return self

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def wait_stream(self, stream: Any) -> None: ...
    def graph_pool_handle(self) -> None: ...

    def memory_reserved(self) -> int:
        return 0


@contextmanager
def recording_dry() -> Iterator[list[CountedGraph]]:
    """Yield the graphs that are started inside."""
    driver = RecordingDriver()
    names = ("CUDAGraph", "Stream", "stream", "graph_pool_handle", "memory_reserved")
    doubles = {name: getattr(driver, name) for name in names}
    with patch.multiple(torch.cuda, **doubles), warnings.catch_warnings():
        # Where a tensor lies, which is nowhere here
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield driver.starts


def replay_calls(
    method: Method,
    recordings: Recordings,
    counts: DeviceCounts,
    arguments: dict[str, Any],
    compute: Callable[[dict[str, Any]], Any],
) -> ReplayCalls:
    """Compute an evaluation, and once more if messages outgrew their memory in the first; record
    it, and replay the recording. ``recordings`` of the method's model record what they may at once.
    """
    asked = AskedOfTorch(counts)

    def answered(given: dict[str, Any]) -> Any:
        with asked:
            return compute(given)

    with recording_dry() as starts:
        recordings.is_wanted = True
        for _ in range(2):
            if not recordings.recorded:
                method.begin(WARM_UP)
                recordings.evaluate(arguments, answered, method.forget)
        if not recordings.recorded:
            return ReplayCalls(unrecorded=recordings.end_run(0).why)
        (recording,) = recordings.recorded.values()
        asked.started.clear()
        asked.sent, sent = 0, 0

        def noted(move: Callable[[], None]) -> None:
            nonlocal sent
            before = asked.sent
            move()
            is_sent = asked.sent > before
            sent += is_sent
            asked.started[cast("partial", move).func.__qualname__] += not is_sent

        pieces = tuple(one._replace(move=one.move and partial(noted, one.move)) for one in recording.pieces)
        method.begin(WARM_UP)
        with asked:
            recording._replace(pieces=pieces).replay(arguments, lambda: None)
    return ReplayCalls(len(pieces), len(starts), sent, dict(+asked.started))
