"""The worker pool: ranks as processes, one request at a time, an explicit state machine.

starting -> ready <-> busy; any of them -> failed or closed. A failed pool is never mended:
``PoolHandle`` starts a fresh one. The UI is the single controller; every method is called from one
thread at a time (the lock makes a second caller wait).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ...parallel_runtime.errors import LayoutError, ModelError, NoRoom, OutOfMemory, PipeMeshError, PoolFailed, Refused, RunCancelled
from ...parallel_runtime.wire.arena import Arena
from ...parallel_runtime.wire.channel import ChannelClosed
from ...parallel_runtime.wire.messages import Close, Done, Failed, Forward, Memory, Ready, Request
from ...parallel_runtime.wire.segment import mib
from .crew import Crew, RankSetup
from .devices import Placement
from .remote_machine import FINISH_S, RemoteMachine, join
from .rendezvous import MachineMissing, net_for, new_meeting
from .supervisor import NEVER_STARTED
from .watch import Watch

log = logging.getLogger("pipemesh")

STATES = {
    "starting": {"ready", "failed", "closed"},
    "ready": {"busy", "failed", "closed"},
    "busy": {"ready", "failed", "closed"},
    "failed": {"closed"},
    "closed": set(),
}
POLL_S = 0.05
CANCEL_WAIT_S = 10.0
OTHERS_WAIT_S = 3.0
CLOSE_GRACE_S = 5.0
CUT_S = 0.1  # a cancelled run returns within 0.5 s, whatever is still on its way to other machines
DEADLY = {
    signal.SIGKILL: "the system does this when memory runs out",
    signal.SIGBUS: "its checkpoint was cut short on disk, or shared memory ran out",
}


class WorkerPool:
    """Ranks that wait for requests. Not started until ``start``."""

    def __init__(self, placement: Placement, setup: RankSetup):
        self.placement = placement
        self._setup = setup
        self._lock = threading.RLock()
        self.state = "starting"
        self.arena = Arena()
        self.memory: list[Memory] = []
        self._crew = Crew(placement, "", setup)
        self._machines: list[RemoteMachine] = []
        self._selector = selectors.DefaultSelector()
        self._requests = 0
        self._owed: dict[int, set[int]] = {}  # request -> ranks that have yet to answer it
        self._answers: dict[int, dict[int, Ready | Done | Failed]] = {}  # request -> rank -> its answer, until they are collected

    @property
    def size(self) -> int:
        return len(self.placement.devices)

    @property
    def writer(self) -> int:
        """The rank that has the output."""
        return self.placement.layout.writer

    @property
    def stages(self) -> int:
        return self.placement.layout.pipefusion

    @property
    def pids(self) -> list[int]:
        """By rank; 0 for a rank on another machine."""
        pids = self._crew.pids
        return [pids.get(rank, 0) for rank in range(self.size)] if pids else []

    def _enter(self, state: str) -> None:
        assert state in STATES[self.state], f"{self.state} -> {state}"
        self.state = state

    # -- life

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Starts every rank and waits until each has said Ready. Raises PoolFailed,
        RunCancelled.
        """
        with self._lock:
            began = time.monotonic()
            try:
                self._launch()
                self._owed = {0: set(range(self.size))}
                replies = self._gather(0, interrupted)
            except (MachineMissing, LayoutError) as error:
                raise self._fail(str(error)) from error
            except OSError as error:
                raise self._fail(f"The worker processes could not be started ({error}): free memory or processes and run again.") from error
            except RunCancelled:
                self.close()
                raise
            self.memory = [reply.memory for reply in replies]
            self._enter("ready")
            log.info("[PipeMesh] %s ready in %.1f s", self.placement.layout.equation(), time.monotonic() - began)

    def _launch(self) -> None:
        """Other machines are asked first: one that is missing is named before any process starts
        here.
        """
        names = self.placement.other_machines
        for name in names:
            self._machines.append(join(name, self.placement.ranks_on(name), self._setup, self.arena.board))
            self._selector.register(self._machines[-1], selectors.EVENT_READ, self._machines[-1])
        net = net_for(self._setup, self._machines[0].own_address, new_meeting()) if names else None
        self._crew.start(self.arena.segment, net)
        for rank, channel in self._crew.channels.items():
            self._selector.register(channel, selectors.EVENT_READ, rank)
        for machine in self._machines:
            machine.open(self.placement, self._setup, net.meeting.name, self.arena.nbytes)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Ends every rank and gives everything back. Safe in every state, any number of times."""
        with self._lock:
            if self.state == "closed":
                return
            if self.state == "failed":
                self._enter("closed")
                return
            if self.idle:
                for end in (*self._machines, *self._crew.channels.values()):
                    with contextlib.suppress(ChannelClosed):  # gone already
                        end.send(Close())
            else:
                grace_s = 0
            self._tear_down(grace_s)
            self._enter("closed")

    def _tear_down(self, grace_s: float, machines_s: float = FINISH_S) -> None:
        self._crew.stop(grace_s)
        for machine in self._machines:
            machine.close(machines_s)
        self._selector.close()
        self.arena.close()

    def _fail(self, sentence: str, rank: int | None = None) -> PoolFailed:
        """The pool is over: returns the error to raise, with the rank's last log lines."""
        self._enter("failed")
        if rank is not None:
            lines = self._side_of(rank).tail(rank)
            sentence += f"\nLast lines of rank {rank}:\n  " + "\n  ".join(lines or ["(none)"])
        self._tear_down(0)
        return PoolFailed(sentence)

    def lost_a_rank(self) -> bool:
        """Whether a rank's process has ended, or a machine is gone, although nobody closed the
        pool. A machine says nothing unasked but that.
        """
        return any(map(self._crew.ended, self._crew.ranks)) or (self.idle and any(machine.has_news() for machine in self._machines))

    # -- requests

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    def call(
        self,
        request: Request,
        fds: Sequence[int] = (),
        interrupted: Callable[[], bool] = lambda: False,
        right: Callable[[], bool] = lambda: True,
    ) -> list[Done]:
        """Sends ``request`` to every rank and returns their answers in rank order.

        ``right`` is asked while the ranks are at work on a Forward; if the request turns out to be
        wrong, they leave it and [] is returned. Raises RunCancelled (the pool stays warm),
        ModelError or Refused (every rank rejected it, the pool stays warm), PoolFailed. A cancelled
        Forward is left early by all ranks at the same block; any other request is finished by them
        and collected later. Only a cancel while tensors are still on their way to another machine
        ends the pool.
        """
        with self._lock:
            if self.state != "ready":
                raise PoolFailed(f"The pool is {self.state}: run again to start a fresh one.")
            stop_if(interrupted)
            self.settle(interrupted)
            self._post(request, fds, interrupted)
            try:
                lockstep, wrong = isinstance(request, Forward), True
                try:
                    wrong = not right()
                finally:
                    if wrong:
                        self.arena.board.cancel(request.request)
                replies = self._gather(request.request, interrupted, cancel=request.request if lockstep else None, lockstep=lockstep)
            finally:
                self._rest()
            return [] if wrong else self._accepted(replies)

    def submit(self, request: Forward) -> None:
        """Sends ``request`` to every rank without waiting; it is answered after those submitted
        before. ``collect`` or ``abandon`` follows.

        Raises PoolFailed.
        """
        with self._lock:
            if self.state not in ("ready", "busy"):
                raise PoolFailed(f"The pool is {self.state}: run again to start a fresh one.")
            self._post(request, ())

    def collect(self, number: int, interrupted: Callable[[], bool] = lambda: False) -> list[Done]:
        """The answers to a submitted request, in rank order. Raises what ``call`` raises; then the
        others submitted are to be abandoned.
        """
        with self._lock:
            try:
                replies = self._gather(number, interrupted, cancel=self._requests)
            finally:
                self._rest()
            return self._accepted(replies)

    def abandon(self) -> None:
        """Ends what was submitted and not collected, and waits until the ranks have left it."""
        with self._lock:
            if self.state in ("failed", "closed"):
                return
            with contextlib.suppress(PipeMeshError):  # whoever abandons has an error to tell already
                if self._owed:
                    self.arena.board.cancel(self._requests)
                    self._gather(None, lambda: False, cancel=self._requests, tolerate=True)
            self._answers.clear()
            self._rest()

    def _post(self, request: Request, fds: Sequence[int], interrupted: Callable[[], bool] = lambda: False) -> None:
        """A cancel in the middle of what goes to another machine cuts the stream: the pool is
        closed.
        """
        if self.state == "ready":
            self._enter("busy")
        for source, end in (*((machine, machine) for machine in self._machines), *self._crew.channels.items()):
            try:
                if isinstance(source, RemoteMachine):
                    end.send(request, fds, lambda: stop_if(interrupted))
                else:
                    end.send(request, fds)
            except RunCancelled:
                self._tear_down(0, CUT_S)
                self._enter("closed")
                raise
            except ChannelClosed as error:
                raise self._gone(source, error) from None
            except OSError as error:
                name = f"Machine {source.name}" if isinstance(source, RemoteMachine) else self._where(source)
                raise self._fail(f"{name} could not be reached ({error}): run again to start a fresh pool.") from error
        self._owed[request.request] = set(range(self.size))

    def _rest(self) -> None:
        if self.state == "busy":
            self._enter("ready")

    def _accepted(self, replies: list[Done]) -> list[Done]:
        self.memory = [reply.memory for reply in replies]
        if any(reply.cancelled for reply in replies):
            raise RunCancelled("The run was cancelled.")
        return replies

    def settle(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Collects what ranks still owe from a cancelled request; before it, nothing in the arena
        may be overwritten.
        """
        with self._lock:
            if self._owed:
                self._gather(None, interrupted, lockstep=True, tolerate=True)

    @property
    def idle(self) -> bool:
        """Whether a request could be sent at once, from whatever thread."""
        return self.state == "ready" and not self._owed

    def _gather(
        self,
        number: int | None,
        interrupted: Callable[[], bool],
        *,
        cancel: int | None = None,
        lockstep: bool = False,
        tolerate: bool = False,
    ) -> list[Ready | Done]:
        """Waits until every rank has answered request ``number``, or all there are. ``lockstep``:
        the ranks meet in collectives, so after a failure the others may never answer.

        ``cancel``: up to which request the ranks can leave early. ``tolerate``: the answers belong
        to a cancelled run, failures included.
        """
        watch = Watch(self.arena.board.progress, self._setup.stall_s)
        deadline = None
        cancelled, failed = False, []
        while number in self._owed or ((number is None or failed) and self._owed):
            for key, _ in self._selector.select(POLL_S):
                self._receive(key.data)
            failed = [answer for answers in self._answers.values() for answer in answers.values() if isinstance(answer, Failed)]
            if failed and deadline is None and (lockstep or cancel is not None):
                will_answer = not lockstep and all(answer.messages_done == "all" for answer in failed)
                deadline = time.monotonic() + (CANCEL_WAIT_S if will_answer else OTHERS_WAIT_S)
                if not lockstep:  # the other stages leave what is on its way to them
                    self.arena.board.cancel(cancel)
            if not cancelled and interrupted():
                cancelled = True
                if cancel is None:
                    raise RunCancelled("The run was cancelled.")
                self.arena.board.cancel(cancel)
                deadline = time.monotonic() + CANCEL_WAIT_S
            if deadline is not None and time.monotonic() > deadline:
                break
            stalled = watch.stalled(sorted(set().union(*self._owed.values())))
            if stalled is not None:
                raise self._stalled(stalled)
        collected = [self._answers.pop(one, {}) for one in ([number] if number is not None and not failed else list(self._answers))]
        failures = {rank: answer for answers in reversed(collected) for rank, answer in answers.items() if isinstance(answer, Failed)}
        staged = cancel is not None and not lockstep
        uneven = any(map(self._out_of_step, collected)) or (staged and self._alone_in_its_stage(failures.values()))
        if failures and (self._owed or not tolerate or uneven):
            raise self._rejected(failures, lockstep, uneven)
        if cancelled or number in self._owed or (number is None and self._owed):
            raise RunCancelled("The run was cancelled.")
        return [answer for _, answer in sorted(collected[0].items())] if collected else []

    def _receive(self, source: int | RemoteMachine) -> None:
        """``source``: a rank of this machine, or another machine, which speaks for its ranks."""
        try:
            said = source.pump() if isinstance(source, RemoteMachine) else [(source, message) for message in self._crew.pump(source)]
        except ChannelClosed as error:
            raise self._gone(source, error) from None
        except MachineMissing as error:
            raise self._fail(str(error)) from error
        except msgspec.DecodeError as error:
            rank = source.ranks[0] if isinstance(source, RemoteMachine) else source
            sentence = f"{self._where(rank)} sent a message this version of PipeMesh does not know ({error}): restart ComfyUI."
            raise self._fail(sentence, rank) from error
        for rank, message in said:
            if message is None:
                raise self._died(rank)
            request = getattr(message, "request", 0)
            if rank in self._owed.get(request, ()):
                self._owed[request].discard(rank)
                self._answers.setdefault(request, {})[rank] = message
                if not self._owed[request]:
                    del self._owed[request]

    # -- what went wrong

    def _where(self, rank: int) -> str:
        return f"Rank {rank} on {self.placement.devices[rank].name}"

    def _side_of(self, rank: int) -> Crew | RemoteMachine:
        return next(side for side in (self._crew, *self._machines) if rank in side.ranks)

    def _gone(self, source: int | RemoteMachine, error: ChannelClosed) -> PoolFailed:
        if not isinstance(source, RemoteMachine):
            return self._died(source)
        ranks = ", ".join(f"rank {rank} on {self.placement.devices[rank].name}" for rank in source.ranks)
        phase = self.arena.board.phase(source.ranks[0])
        return self._fail(
            f"Machine {source.name} was lost while {phase} ({ranks}; {error}): see that it is up, that the network reaches it "
            "and that torchrun runs there, then run again, a fresh pool will be started."
        )

    def _died(self, rank: int) -> PoolFailed:
        status = self._side_of(rank).exit_of(rank, wait_s=2.0)
        phase = self.arena.board.phase(rank)
        if status is None:
            cause = "closed its connection"
        elif status == NEVER_STARTED:
            cause = "could not be forked (why is in ComfyUI's log; with PIPEMESH_FORK=0 workers start without it)"
        elif -status in DEADLY:
            cause = f"was killed (signal {-status}; {DEADLY[-status]})"
        else:
            cause = f"ended with {'signal ' + str(-status) if status < 0 else 'exit status ' + str(status)}"
        return self._fail(f"{self._where(rank)} {cause} while {phase}: run again, a fresh pool will be started.", rank)

    def _stalled(self, rank: int) -> PoolFailed:
        phase = self.arena.board.phase(rank)
        ports = "see that every port is open between the machines, or set GLOO_SOCKET_IFNAME to the interface between them; "
        return self._fail(
            f"{self._where(rank)} made no progress for {self._setup.stall_s:g} s while {phase}: "
            f"{ports if self._machines and phase == 'joining' else ''}"
            "run again, a fresh pool will be started (PIPEMESH_STALL_S sets the limit).",
            rank,
        )

    def _rejected(self, failures: dict[int, Failed], lockstep: bool, uneven: bool) -> PipeMeshError:
        """If the ranks agree on where they are the pool goes on: all answered, and in lockstep all
        failed. Else it is torn down.
        """
        rank, failure = min(failures.items(), key=lambda item: (item[1].kind != "memory", item[0]))
        log.debug("rank %d: %s", rank, failure.trace)
        agree = len(failures) == self.size and self.placement.backend == "gloo"  # nccl may hold exchanges that only some have issued
        warm = not self._owed and not uneven and (agree or not lockstep)
        if failure.kind in ("room", "refused") and warm:
            return (NoRoom if failure.kind == "room" else Refused)(failure.text)
        if failure.kind == "memory":
            memory = failure.memory
            cause = (failure.text.splitlines() or ["no details"])[0]  # a bare MemoryError has no text
            sentence = (
                f"{self._where(rank)} ran out of memory while {failure.phase} ({mib(memory.free)} of {mib(memory.total)} free, "
                f"{mib(memory.model)} held by models; {cause}): use more ranks, a smaller image or batch, or free memory."
            )
        else:
            sentence = f"{self._where(rank)} failed while {failure.phase}: {failure.text}"
        if warm and failure.kind == "memory":
            return OutOfMemory(sentence)
        if warm:
            return ModelError(f"{sentence.rstrip('.')}. Check what is connected to this node; the workers are ready for the next run.")
        return self._fail(f"{sentence.rstrip('.')}. Run again, a fresh pool will be started.", rank)

    def _alone_in_its_stage(self, failures: Iterable[Failed]) -> bool:
        """Whether a rank may have left out an exchange that others of its stage have issued: nccl
        lets them answer all the same.

        For room, and for what they refuse, the ranks of a stage agree.
        """
        several = self.placement.layout.ulysses > 1 and self.placement.backend == "nccl"
        return several and any(failure.kind in ("memory", "error") for failure in failures)

    def _out_of_step(self, answers: dict[int, Done | Failed]) -> bool:
        """Whether, in one request, a stage may have left a message in its link, where the next
        patch would find it.
        """
        done = {answer.messages_done if isinstance(answer, Failed) else "all" for answer in answers.values()}
        return not (done <= {"all"} or (done == {"none"} and len(answers) == self.size))


def stop_if(interrupted: Callable[[], bool]) -> None:
    if interrupted():
        raise RunCancelled("The run was cancelled.")


class PoolHandle:
    """What nodes pass around: a placement and how to get its pool, never a live socket. Starts
    lazily, and anew after a failure.
    """

    def __init__(self, placement: Placement, setup: RankSetup, before_start: Callable[[PoolHandle], None] = lambda handle: None):
        self.placement = placement
        self._setup = setup
        self._before_start = before_start
        self._pool: WorkerPool | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        return self._pool.state if self._pool else "closed"

    def live(self) -> WorkerPool | None:
        """The pool if it can take requests now: not one that lost a rank while nobody looked."""
        usable = self._pool is not None and self._pool.state in ("ready", "busy") and not self._pool.lost_a_rank()
        return self._pool if usable else None

    def ensure(self, interrupted: Callable[[], bool] = lambda: False) -> WorkerPool:
        """Raises PoolFailed, RunCancelled."""
        with self._lock:
            if self.live() is None:
                if self._pool is not None:
                    self._pool.close()  # of one that lost a rank between runs, the others are still there
                self._before_start(self)
                pool = WorkerPool(self.placement, self._setup)
                pool.start(interrupted)
                self._pool = pool
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


class PoolKeeper:
    """Every pool of this ComfyUI. One at a time may hold a device: starting another layout on it
    closes the first.
    """

    def __init__(self, setup: RankSetup):
        self._setup = setup
        self._handles: dict[Placement, PoolHandle] = {}
        weakref.finalize(self, _close_all, self._handles)

    def handle(self, placement: Placement) -> PoolHandle:
        if placement not in self._handles:
            self._handles[placement] = PoolHandle(placement, self._setup, self._make_room)
        return self._handles[placement]

    def handles(self) -> list[PoolHandle]:
        return list(self._handles.values())

    def _make_room(self, newcomer: PoolHandle) -> None:
        for handle in self._handles.values():
            shared = set(handle.placement.devices) & set(newcomer.placement.devices)
            if handle is not newcomer and shared and handle.state in ("ready", "busy"):  # also one that has lost a rank
                log.info("[PipeMesh] closing the pool of %s to make room", handle.placement.layout.equation())
                handle.close()

    def close(self) -> None:
        _close_all(self._handles)


def _close_all(handles: dict[Placement, PoolHandle]) -> None:
    for handle in handles.values():
        handle.close()
