"""A machine's leader: `torchrun ... -m launcher node`, once on every machine.

It lends the machine to a ComfyUI elsewhere that holds the same secret: starts the ranks of a pool
there, hands every request on to them and their answers back, and ends them when the connection
does. Each connection is one pool's.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...parallel_runtime.errors import LayoutError, SharedMemoryFull
from ...parallel_runtime.layout import Layout
from ...parallel_runtime.wire.arena import Board
from ...parallel_runtime.wire.channel import ChannelClosed, close_all
from ...parallel_runtime.wire.messages import Beat, Close, Denied, Ended, Failed, Fetch, Forward, Memory, Open, Request, Said, ToMachine
from ...parallel_runtime.wire.segment import Segment
from ...parallel_runtime.wire.tcp import Link, notice_loss, prove
from ...parallel_runtime.wire.tree import decode_tree
from ..comfyui.find import ComfyInstall
from ..comfyui.install import LaunchError
from .crew import Crew, RankSetup
from .devices import ELSEWHERE, Device, Placement, visible_gpus
from .remote_machine import MachineMissing, between_machines, check_rendezvous, net_for, node_command, open_store, store_key
from .worker_main import die_with_parent

BEAT_S = 1.0
CLOSE_GRACE_S = 4.0
STORE_TIMEOUT_S = 30.0
log = logging.getLogger("pipemesh")


class LentRanks:
    """One pool's ranks on this machine."""

    def __init__(self, link: Link, own_address: str, setup: RankSetup):
        self._link = link
        self._own_address = own_address
        self._setup = setup
        self._owing: dict[int, int] = {}  # rank -> request it has not answered
        self._last_beat = 0.0

    def run(self) -> None:
        """Until ComfyUI closes the connection, or it is lost."""
        with contextlib.closing(self._link), contextlib.suppress(ChannelClosed):
            try:
                self._serve()
            except (LayoutError, MachineMissing, SharedMemoryFull, OSError, msgspec.DecodeError) as error:
                if isinstance(error, ChannelClosed):
                    raise
                self._link.send(Denied(str(error)))

    def _serve(self) -> None:
        opening, _fds = self._link.receive()
        if not isinstance(opening, Open):
            raise LayoutError(f"The first word was {type(opening).__name__}: install the same version of PipeMesh on every machine.")
        placement = placement_here(opening)
        setup = replace(self._setup, comfy_args=decode_tree(opening.comfy_args, _no_tensors))
        crew = Crew(placement, opening.machine, setup)
        arena = Segment.create("arena", opening.arena_bytes)
        grace_s = 0.0
        try:
            crew.start(arena, net_for(setup, self._own_address, opening.meeting))
            self._owing = dict.fromkeys(crew.ranks, 0)
            self._relay(crew, arena)
            grace_s = CLOSE_GRACE_S
        finally:
            crew.stop(grace_s)
            arena.close()

    def _relay(self, crew: Crew, arena: Segment) -> None:
        """Returns after Close. Raises ChannelClosed when ComfyUI is gone."""
        board = Board(arena)
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ, None)
            for rank, channel in crew.channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while True:
                ready = selector.select(BEAT_S)
                if self._owing and time.monotonic() - self._last_beat >= BEAT_S:
                    self._beat(crew, board)
                for key, _ in ready:
                    if key.data is None:
                        if self._hand_on(crew, arena):
                            return
                    elif not self._hand_back(crew, board, key.data):
                        selector.unregister(key.fileobj)

    def _hand_on(self, crew: Crew, arena: Segment) -> bool:
        """Whether it was Close."""
        for message, fds in self._link.pump():
            try:
                if isinstance(message, Close):
                    send_all(crew, message)
                    return True
                if isinstance(message, Open):
                    raise LayoutError("A pool was opened twice: install the same version of PipeMesh on every machine.")
                self._request(crew, arena, message, fds)
            finally:
                close_all(fds)
        return False

    def _request(self, crew: Crew, arena: Segment, message: Request, fds: list[int]) -> None:
        self._owing = dict.fromkeys(crew.ranks, message.request)
        try:
            if self._link.no_room is not None:
                raise self._link.no_room
            if isinstance(message, Forward | Fetch):
                arena.grow(message.arena_bytes)
        except SharedMemoryFull as error:
            self._owing.clear()
            for rank in crew.ranks:
                self._link.send(Said(rank, shared_memory_full(message.request, error)))
            return
        send_all(crew, message, fds)

    def _hand_back(self, crew: Crew, board: Board, rank: int) -> bool:
        """False when the rank has ended."""
        try:
            messages = crew.pump(rank)
        except ChannelClosed:
            self._beat(crew, board)
            self._link.send(Ended(rank, crew.exit_of(rank, 2.0), tuple(crew.tail(rank))))
            return False
        for message in messages:
            if self._owing.get(rank) == getattr(message, "request", 0):
                del self._owing[rank]
            self._link.send(Said(rank, message))
        return True

    def _beat(self, crew: Crew, board: Board) -> None:
        self._link.send(Beat({rank: board.line(rank) for rank in crew.ranks}))
        self._last_beat = time.monotonic()


def send_all(crew: Crew, message: Request | Close, fds: list[int] = ()) -> None:
    for channel in crew.channels.values():
        with contextlib.suppress(ChannelClosed):  # its end is told when its channel is read
            channel.send(message, fds)


def shared_memory_full(request: int, error: SharedMemoryFull) -> Failed:
    return Failed(request=request, kind="error", phase="receiving", text=str(error), trace="", memory=Memory(0, 0, 0))


def placement_here(opening: Open) -> Placement:
    """The whole pool's placement, with the addresses of this machine's GPUs. Raises LayoutError for
    one that it has not.
    """
    devices = [Device(name) for name in opening.devices]
    mine = [device for device in devices if device.machine == opening.machine]
    gpus = {gpu.name: gpu.uuid for gpu in visible_gpus(cpu_only=not any(device.is_gpu for device in mine))}
    lacking = [device.local_name for device in mine if device.is_gpu and device.local_name not in gpus]
    if lacking:
        raise LayoutError(f"It has no {lacking[0]}: choose from {', '.join(['cpu', *gpus])}.")
    devices = [replace(device, uuid=gpus.get(device.local_name, "")) if device in mine else device for device in devices]
    return Placement(layout=Layout(**opening.degrees), devices=tuple(devices), backend=opening.backend)


def _no_tensors(_ref: object) -> object:
    raise msgspec.DecodeError("a tensor among ComfyUI's arguments")


def serve(sock: socket.socket, peer: str, setup: RankSetup) -> None:
    """A connection's life, in a thread of its own."""
    sock.settimeout(setup.lost_s)
    try:
        prove(sock, setup.secret, b"host")
    except OSError as error:
        log.warning("[PipeMesh] %s was turned away: %s", peer, error)
        sock.close()
        return
    sock.settimeout(None)
    notice_loss(sock, setup.lost_s)
    log.info("[PipeMesh] %s opens a pool", peer)
    LentRanks(Link(sock, ToMachine), sock.getsockname()[0], setup).run()
    log.info("[PipeMesh] the pool of %s is closed; waiting for the next", peer)


def accept(listener: socket.socket, setup: RankSetup) -> None:
    """For ever, or until the listener is closed. Raises OSError where it cannot: torchrun then
    starts this leader again.
    """
    while True:
        try:
            sock, (peer, *_) = listener.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # closed, or shut down
                return
            raise
        threading.Thread(target=serve, args=(sock, peer, setup), name="pipemesh-session", daemon=True).start()


def own_address_towards(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))  # sends nothing
        return sock.getsockname()[0]


def listen(address: str, port: int) -> socket.socket:
    """Raises LaunchError."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise LaunchError(f"Nothing can listen at {address}:{port} ({error.strerror}): give another --port, or none.") from error


def register(store: Any, name: str, known: str) -> None:
    """``known``: this leader's ADDRESS:PORT. Raises LaunchError where another machine
    has the name."""
    before = ""
    while (now := store.compare_set(store_key(name), before, known).decode()) != known:
        where = now.rpartition(":")[0]
        if where != known.rpartition(":")[0]:
            raise LaunchError(
                f"{name} is the machine at {where} already: give this one another --name, "
                f"or start torchrun anew on every machine if {name} has moved here."
            )
        before = now


def require_torchrun(environ: Mapping[str, str]) -> None:
    """Raises LaunchError with the command that starts it."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        raise LaunchError(f"`node` is started by torchrun: {node_command(environ.get('PIPEMESH_RDZV') or 'ADDRESS:PORT')}")


def main(argv: list[str], host: ComfyInstall) -> int:
    parser = argparse.ArgumentParser(prog="torchrun ... -m launcher node", description="Lends this machine to a ComfyUI on another.")
    parser.add_argument(
        "--name", default=socket.gethostname(), help="as in the pool's devices: NAME/cuda:0 (default: the machine's own name)"
    )
    parser.add_argument("--port", type=int, default=0, help="to listen on, for a firewall (default: any)")
    options = parser.parse_args(argv)
    if not ELSEWHERE.fullmatch(f"{options.name}/cpu"):
        raise LaunchError(f"{options.name!r} cannot be named in a list of devices: give a --name of letters, digits, dots and dashes.")
    require_torchrun(os.environ)
    die_with_parent(os.getppid())  # torchrun, which may be killed
    setup = RankSetup(comfyui=host.comfyui, **between_machines(os.environ))
    address, port = check_rendezvous(setup, options.name)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        store = open_store(address, port, STORE_TIMEOUT_S)
        own_address = own_address_towards(address, port)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"Nothing answers at the rendezvous {setup.rendezvous} ({error}): see that it is torchrun's endpoint.") from error
    listener = listen(own_address, options.port)
    known = "{}:{}".format(*listener.getsockname())
    register(store, options.name, known)
    log.info("[PipeMesh] %s at %s waits for a ComfyUI that meets at %s", options.name, known, setup.rendezvous)
    accept(listener, setup)
    return 0
