"""Lends this machine to one pool: starts its ranks here, hands every request on to them and their
answers back, and ends them when the connection does.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

import msgspec

from ..parallel_runtime.errors import LayoutError, SharedMemoryFull
from ..parallel_runtime.layout import Layout
from ..parallel_runtime.wire.arena import ROOM, Board
from ..parallel_runtime.wire.channel import ChannelClosed, close_all
from ..parallel_runtime.wire.messages import (
    Beat,
    Cancel,
    Close,
    Denied,
    Done,
    Ended,
    EndRun,
    Failed,
    ForRanks,
    FromMachine,
    Open,
    Request,
    Said,
)
from ..parallel_runtime.wire.segment import Segment
from ..parallel_runtime.wire.tcp import BEAT_S, Link
from ..parallel_runtime.wire.tree import decode_plain
from .crew import Crew
from .devices import Device, Placement, visible_gpus
from .package import VERSION
from .rank_setup import RankSetup
from .rendezvous import MachineMissing, net_for

CLOSE_GRACE_S = 4.0
SAME_VERSION = "install the same version of PipeMesh on every machine."


class LentRanks:
    """The ranks of one pool on this machine, lent to the ComfyUI at the other end of ``link``."""

    def __init__(self, link: Link, own_address: str, setup: RankSetup):
        self._link = link
        self._own_address = own_address
        self._setup = setup
        self._owing: dict[int, int] = {}  # rank -> request it has not answered
        self._lines: Callable[[], dict[int, tuple[int, int, int, int]]] = dict  # of its ranks on the board
        # What is on its way to ComfyUI, with ranges of the arena; None at the end
        self._said: SimpleQueue[tuple[FromMachine, Sequence[tuple[int, int, int]]] | None] = SimpleQueue()

    def run(self) -> None:
        """Serves the pool until ComfyUI closes the connection, or it is lost."""
        with (
            contextlib.closing(self._link),
            contextlib.ExitStack() as last,
            contextlib.suppress(ChannelClosed),
            self._speaking(),
        ):
            try:
                self._serve(last)
            except msgspec.DecodeError as error:
                self._say(
                    Denied(
                        f"Its PipeMesh {VERSION} was sent a message that it does not know ({error}):"
                        f" {SAME_VERSION}"
                    )
                )
            except (LayoutError, MachineMissing, SharedMemoryFull, OSError) as error:
                if isinstance(error, ChannelClosed):
                    raise
                self._say(Denied(str(error)))

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Sends queued messages in a thread of its own. ComfyUI reads only after it has sent, so
        this thread must keep reading, however much is on its way back.
        """
        thread = threading.Thread(target=self._send_all_said, name="pipemesh-saying", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._said.put(None)
            thread.join(self._setup.lost_s)  # by then the kernel has given up a ComfyUI that does not read

    def _send_all_said(self) -> None:
        try:
            while (one := self._next_said()) is not None:
                message, ranges = one
                self._link.send(message, ranges=ranges)
                del one, message  # and with them an output's memory
        except ChannelClosed:
            pass  # who reads from ComfyUI notices too
        except BaseException:
            self._link.cut()  # nobody would hear of this machine any more
            raise

    def _next_said(self) -> tuple[FromMachine, Sequence[tuple[int, int, int]]] | None:
        """Returns the next message to send. If ranks here owe an answer and nothing else was queued
        for a while, it is their progress.
        """
        while True:
            with contextlib.suppress(Empty):
                return self._said.get(timeout=BEAT_S)
            if self._owing:
                return Beat(self._lines()), ()

    def _say(self, message: FromMachine, ranges: Sequence[tuple[int, int, int]] = ()) -> None:
        self._said.put((message, ranges))

    def _serve(self, last: contextlib.ExitStack) -> None:
        """``last`` is closed when everything is sent. So is the arena, because outputs are sent
        from it.
        """
        self._owing = {-1: 0}  # whichever ranks they are: it beats from now on
        opening, _fds = self._link.receive()
        if not isinstance(opening, Open):
            raise LayoutError(
                f"It was sent {type(opening).__name__} before a pool was opened: {SAME_VERSION}"
            )
        placement = placement_here(opening)
        setup = replace(self._setup, comfy_args=decode_plain(opening.comfy_args))
        crew = Crew(placement, opening.machine, setup)
        arena = Segment.create("arena", opening.arena_bytes, ROOM)
        last.callback(arena.close)
        grace_s = 0.0
        try:
            crew.start(arena, net_for(setup, self._own_address, opening.meeting))
            self._owing = dict.fromkeys(crew.ranks, 0)
            self._relay(crew, arena)
            grace_s = CLOSE_GRACE_S
        finally:
            crew.stop(grace_s)

    def _relay(self, crew: Crew, arena: Segment) -> None:
        """Passes messages on, both ways, until Close. Raises ChannelClosed when ComfyUI is gone."""
        board = Board(arena)
        self._lines = lambda: {rank: board.line(rank) for rank in crew.ranks}
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ, None)
            for rank, channel in crew.channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        if self._pass_on(crew, arena, board):
                            return
                    elif not self._pass_back(crew, arena, key.data):
                        selector.unregister(key.fileobj)

    def _pass_on(self, crew: Crew, arena: Segment, board: Board) -> bool:
        """Reads from ComfyUI once, and passes its messages on. True after Close."""
        for message, fds in self._link.pump():
            try:
                if isinstance(message, Close):
                    send_all(crew, message)
                    return True
                if isinstance(message, Open):
                    raise LayoutError(f"A pool was opened twice: {SAME_VERSION}")
                if isinstance(message, Cancel):
                    board.cancel(message.request)
                else:
                    self._request(crew, arena, message, fds)
            finally:
                close_all(fds)
        return False

    def _request(self, crew: Crew, arena: Segment, message: ForRanks, fds: list[int]) -> None:
        """Passes a request on to its ranks on this machine, once the content that came with it is
        in the arena.
        """
        request, ranks = message.request, [rank for rank in crew.ranks if rank in message.ranks]
        try:
            if self._link.no_room is not None:
                raise self._link.no_room
            arena.grow(message.arena_bytes)
            if isinstance(request, EndRun) and request.arena_bytes:
                arena.shrink(request.arena_bytes)  # its ranks cut it off before they get anything else
            if message.pieces:
                arena.fill(message.pieces, fds[-1])
        except SharedMemoryFull as error:
            full = Failed(
                request=request.request,
                kind="error",
                phase="receiving",
                text=str(error),
                at=(0, 0),
            )
            for rank in ranks:
                self._say(Said(rank, full))
            return
        self._owing |= dict.fromkeys(ranks, request.request)
        send_all(crew, request, fds[: len(fds) - bool(message.pieces)], ranks)

    def _pass_back(self, crew: Crew, arena: Segment, rank: int) -> bool:
        """Passes back the messages of ``rank``. False when it has ended."""
        try:
            messages = list(crew.channels[rank].pump())
        except ChannelClosed:
            self._say(Beat(self._lines()))
            self._say(Ended(rank, crew.supervisor.exit_of(rank, 2.0), tuple(crew.supervisor.tail(rank))))
            return False
        for message, _fds in messages:
            if self._owing.get(rank) == getattr(message, "request", 0):
                del self._owing[rank]
            offset, nbytes = message.wrote if isinstance(message, Done) else (0, 0)
            self._say(Said(rank, message), [(arena.fd, offset, nbytes)] if nbytes else ())
        return True


def send_all(
    crew: Crew, message: Request | Close, fds: Sequence[int] = (), ranks: Sequence[int] | None = None
) -> None:
    """Sends a message to ``ranks`` of the crew, by default to all."""
    for channel in [channel for rank, channel in crew.channels.items() if ranks is None or rank in ranks]:
        with contextlib.suppress(ChannelClosed):  # its end is told when its channel is read
            channel.send(message, fds)


def placement_here(opening: Open) -> Placement:
    """Returns the placement of the whole pool, with the addresses of this machine's GPUs. Raises
    LayoutError if it names one that is not here.
    """
    devices = [Device(name) for name in opening.devices]
    mine = [device for device in devices if device.machine == opening.machine]
    gpus = {gpu.name: gpu for gpu in visible_gpus(cpu_only=not any(device.is_gpu for device in mine))}
    lacking = [device.local_name for device in mine if device.is_gpu and device.local_name not in gpus]
    if lacking:
        raise LayoutError(f"It has no {lacking[0]}: choose from {', '.join(['cpu', *gpus])}.")
    devices = [
        replace(gpus.get(device.local_name, device), name=device.name) if device in mine else device
        for device in devices
    ]
    return Placement(
        layout=Layout(**opening.degrees),
        devices=tuple(devices),
        backend=opening.backend,
        speeds=opening.speeds,
    )
