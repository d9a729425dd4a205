"""Count evaluations in a process of its own, which is started as a rank is, sees no GPU, and ends
when nobody has asked for a while, or with ComfyUI.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import msgspec

from ..parallel_runtime.planner.counts import CounterLost, NotCounted
from ..parallel_runtime.planner.evaluation_count import Whole
from ..parallel_runtime.wire.channel import ChannelClosed
from ..parallel_runtime.wire.messages import Count, Counted, FromCounter
from .devices import Device
from .rank_setup import RankSetup
from .side_process import SCRIPT, SideProcess

LIMIT_S = 120.0  # of one count, with the start of the process
IDLE_S = 300.0  # after which the process ends: it holds ComfyUI's modules
log = logging.getLogger("pipemesh")


class Counter:
    """Counts one evaluation after the other, in a thread that lasts until ``close``. ``device``: of
    ranks, for the process to be a fork of the same server as they. ``begin`` returns at once, and
    never raises.
    """

    def __init__(
        self,
        setup: RankSetup,
        device: Callable[[], Device],
        argv: Sequence[str] = (SCRIPT, "{fd}", "{parent}", "counter"),
        limit_s: float = LIMIT_S,
        idle_s: float = IDLE_S,
    ):
        self._work = CountingWork(lambda: counting_process(setup, device(), argv), limit_s, idle_s)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._work.end)

    def begin(self, described: bytes) -> Future[Whole]:
        future: Future[Whole] = Future()
        with self._lock:
            if not self._end.alive:
                future.set_exception(lost("was ended"))
                return future
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work.serve, name="pipemesh-counter", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread left
                    future.set_exception(lost(f"could not be started ({error})"))
                    return future
                self._thread = thread
            self._work.asked.put((described, future))
        return future

    def close(self) -> None:
        """Ends the process. The present count is lost."""
        with self._lock:
            self._end()


class CountingWork:
    """The queue of models to count, and the process that counts. ``start`` makes the process while
    the queue has entries. The thread holds this object and not the Counter, which may be dropped
    while the thread waits.
    """

    def __init__(self, start: Callable[[], SideProcess], limit_s: float, idle_s: float):
        self.process: SideProcess | None = None
        self.asked: SimpleQueue[tuple[bytes, Future[Whole]] | None] = SimpleQueue()
        self._start = start
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._is_over = False

    def serve(self) -> None:
        """Counts until ``end``; entries that are left then are lost."""
        while True:
            try:
                one = self.asked.get(timeout=self._idle_s if self.process else None)
            except Empty:
                self._end_process()
                continue
            if one is None:
                break
            self._answer(*one)
        self._end_process()

    def end(self) -> None:
        self._is_over = True
        self.asked.put(None)
        process = self.process
        if process is not None:
            process.kill()

    def _answer(self, described: bytes, future: Future[Whole]) -> None:
        if self._is_over:
            future.set_exception(lost("was ended"))
            return
        try:
            future.set_result(self._count(described))
        except NotCounted as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a sampling waits for this future, and the next count for this thread
            future.set_exception(lost(f"could not be asked ({error or type(error).__name__})"))

    def _count(self, described: bytes) -> Whole:
        """Raises NotCounted, and the errors of starting and asking."""
        until = time.monotonic() + self._limit_s
        try:
            if self.process is None:
                self.process = self._start()
            self.process.channel.send(Count(described=described))
            message = self.process.receive(until)
            if isinstance(message, Counted):
                return msgspec.msgpack.decode(message.whole, type=Whole)
            raise NotCounted(message.why)
        except NotCounted:
            raise
        except ChannelClosed:
            raise lost(self._end_process()) from None
        except TimeoutError:
            self._end_process()
            raise lost(f"took longer than {self._limit_s:g} s and was ended") from None
        except BaseException:
            self._end_process()
            raise

    def _end_process(self) -> str:
        """Ends the process. Returns how it had ended by itself, if it had."""
        process, self.process = self.process, None
        return process.end() if process is not None else ""


def counting_process(setup: RankSetup, device: Device, argv: Sequence[str]) -> SideProcess:
    return SideProcess(setup, device, argv, FromCounter, {**setup.comfy_args, "cpu": True})


def lost(what: str) -> CounterLost:
    log.warning("[PipeMesh] The process that counts %s: nothing is predicted by this count.", what)
    return CounterLost(f"the process that counts {what}")
