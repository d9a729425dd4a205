"""Count evaluations in a process of its own, which is started as a rank is, sees no GPU, and ends
when nobody has asked for a while, or with ComfyUI.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from ...parallel_runtime.planner.counts import CounterLost, NotCounted
from ...parallel_runtime.planner.whole import Whole
from ...parallel_runtime.wire.channel import Channel, ChannelClosed
from ...parallel_runtime.wire.messages import Count, Counted, CountLike, FromCounter
from ...parallel_runtime.wire.tree import encode_tree
from .crew import no_tensor, rank_environment
from .devices import CUDA_VARIABLE, HIP_VARIABLE, Device
from .rank_setup import RankSetup
from .supervisor import NEVER_STARTED, SERVER_ENDED, Command, Supervisor

SCRIPT = str(Path(__file__).with_name("counter_main.py"))
LIMIT_S = 120.0  # of one count, with the start of the process
IDLE_S = 300.0  # after which the process ends: it holds ComfyUI's modules
REAP_S = 5.0
log = logging.getLogger("pipemesh")


class Counter:
    """Counts one evaluation after the other. ``device``: of ranks, for the process to be a fork of
    the same server as they. ``begin`` returns at once, and never raises.
    """

    def __init__(
        self,
        setup: RankSetup,
        device: Callable[[], Device],
        script: str = SCRIPT,
        limit_s: float = LIMIT_S,
        idle_s: float = IDLE_S,
    ):
        self._start = lambda: CountingProcess(setup, device(), script)
        self._queue = Queue(limit_s, idle_s)
        weakref.finalize(self, self._queue.close)

    def begin(self, described: bytes) -> Future[Whole]:
        return self._queue.add(described, self._start)

    @property
    def pid(self) -> int:
        """The process; 0 while there is none."""
        process = self._queue.process
        return process.pid if process is not None else 0

    def close(self) -> None:
        """Ends the process. What is being counted is lost."""
        self._queue.close()


class Queue:
    """What is to be counted, and who counts it while there is something."""

    def __init__(self, limit_s: float, idle_s: float):
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._asked: deque[tuple[bytes, Future[Whole]]] = deque()
        self._serving: Serving | None = None
        self._is_closed = False

    @property
    def process(self) -> CountingProcess | None:
        serving = self._serving
        return serving.process if serving is not None else None

    def add(self, described: bytes, start: Callable[[], CountingProcess]) -> Future[Whole]:
        future: Future[Whole] = Future()
        with self._changed:
            self._asked.append((described, future))
            self._changed.notify()
            if self._serving is None:
                self._serving = Serving(start, self._limit_s)
                try:
                    threading.Thread(
                        target=self._serve, args=(self._serving,), name="pipemesh-counter", daemon=True
                    ).start()
                except RuntimeError as error:  # the system has no thread left
                    self._leave(self._serving, f"could not be started ({error})")
        return future

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            process = self.process
        if process is not None:
            process.kill()

    def _serve(self, serving: Serving) -> None:
        try:
            while (asked := self._next(serving)) is not None:
                serving.answer(*asked)
        finally:
            self._leave(serving, "was ended")
            serving.end()

    def _next(self, serving: Serving) -> tuple[bytes, Future[Whole]] | None:
        with self._changed:
            if not self._asked and not self._is_closed:
                self._changed.wait(self._idle_s)
            if self._asked and not self._is_closed:
                return self._asked.popleft()
            self._leave(serving, "was ended")  # before anybody else asks: another process counts that
            return None

    def _leave(self, serving: Serving, why: str) -> None:
        """Forgets who serves, unless another does already; what is left to count is lost."""
        with self._changed:
            if self._serving is serving:
                self._serving = None
                for _, future in self._asked:
                    future.set_exception(lost(why))
                self._asked.clear()


class Serving:
    """The process of one thread, which ``start`` starts when there is something to count."""

    def __init__(self, start: Callable[[], CountingProcess], limit_s: float):
        self.process: CountingProcess | None = None
        self._start = start
        self._limit_s = limit_s

    def answer(self, described: bytes, future: Future[Whole]) -> None:
        try:
            future.set_result(self._counted(described))
        except NotCounted as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a sampling waits for this future, and the next count for this thread
            future.set_exception(lost(f"could not be asked ({error or type(error).__name__})"))

    def end(self) -> str:
        """Ends the process; returns how it had ended, where it had."""
        process, self.process = self.process, None
        return process.end() if process is not None else ""

    def _counted(self, described: bytes) -> Whole:
        """Raises NotCounted, and whatever starting or asking does."""
        until = time.monotonic() + self._limit_s
        try:
            if self.process is None:
                self.process = self._start()
            return self.process.ask(described, until)
        except NotCounted:
            raise
        except ChannelClosed:
            raise lost(self.end()) from None
        except TimeoutError:
            self.end()
            raise lost(f"took longer than {self._limit_s:g} s and was ended") from None
        except BaseException:
            self.end()
            raise


class CountingProcess:
    """One such process. Raises OSError where it cannot be started."""

    def __init__(self, setup: RankSetup, device: Device, script: str):
        comfy_args = encode_tree({**setup.comfy_args, "cpu": True}, no_tensor)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._channel = Channel(ours, FromCounter)
            with theirs:
                argv = (setup.argv[0], script, "{fd}", "{parent}")
                self._supervisor = Supervisor(
                    [Command(argv, environment(device), theirs.fileno())], setup.start
                )
                self._supervisor.start()
            undo.callback(self._supervisor.stop, 0)
            with contextlib.suppress(ChannelClosed):  # it has ended: the next question finds that
                self._channel.send(CountLike(comfyui=setup.comfyui, comfy_args=comfy_args))
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._supervisor.pids[0]

    def ask(self, described: bytes, until: float) -> Whole:
        """Raises NotCounted, ChannelClosed where it has ended, TimeoutError."""
        self._channel.send(Count(described=described))
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        while poller.poll(max(0.0, 1e3 * (until - time.monotonic()))):
            for message, _ in self._channel.pump():
                if isinstance(message, Counted):
                    return msgspec.msgpack.decode(message.whole, type=Whole)
                raise NotCounted(message.why)
        raise TimeoutError

    def kill(self) -> None:
        self._supervisor.stop(0)

    def end(self) -> str:
        """Ends it; returns how it had ended by itself, in words."""
        status = self._supervisor.exit_of(0, REAP_S if is_closed(self._channel) else 0)
        self._supervisor.stop(0)
        self._channel.close()
        last = (self._supervisor.tail(0) or [""])[-1]
        return f"{how(status)}{f': {last}' if last and (status or 0) > 0 else ''}"


def is_closed(channel: Channel) -> bool:
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLHUP)
    return bool(poller.poll(0))


def environment(device: Device) -> dict[str, str]:
    """Return a rank's environment without a GPU. It keeps what a process has from its start as
    ranks on ``device`` have it, or those would need another fork server.
    """
    return {**rank_environment(device, "gloo", dict(os.environ)), CUDA_VARIABLE: "", HIP_VARIABLE: ""}


def how(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status in (NEVER_STARTED, SERVER_ENDED):
        return (
            "could not be forked"
            if status == NEVER_STARTED
            else "ended with the process that workers are forked from"
        )
    return f"was killed (signal {-status})" if status < 0 else f"ended with exit status {status}"


def lost(what: str) -> CounterLost:
    log.warning("[PipeMesh] The process that counts %s: nothing is predicted by this count.", what)
    return CounterLost(f"the process that counts {what}")
