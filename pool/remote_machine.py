"""ComfyUI's end of another machine: found through torchrun's rendezvous, spoken to over one
connection that lasts as long as the pool.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..parallel_runtime.errors import SharedMemoryFull
from ..parallel_runtime.wire.arena import Arena
from ..parallel_runtime.wire.channel import ChannelClosed, close_all
from ..parallel_runtime.wire.messages import (
    PHASE,
    Beat,
    Denied,
    Done,
    Ended,
    Failed,
    ForRanks,
    Forward,
    FromMachine,
    Open,
    Request,
)
from ..parallel_runtime.wire.segment import TensorRef
from ..parallel_runtime.wire.tcp import COMFYUI, Link, SecretRefused, notice_loss, shake_hands
from ..parallel_runtime.wire.tree import decode_tree, encode_plain
from .devices import Placement
from .rank_setup import SECRET_VARIABLE, RankSetup
from .rendezvous import (
    MachineMissing,
    check_rendezvous,
    find,
    node_command,
    open_store,
    own_hello,
    version_conflict,
)

MOST_VERSIONS = 4096
NO_TENSOR = torch.empty(0)


def join(name: str, ranks: tuple[int, ...], setup: RankSetup, arena: Arena) -> RemoteMachine:
    """Connects to the leader of machine ``name``. Raises MachineMissing, and LayoutError if the
    setup names no rendezvous.
    """
    known = leader_address(name, setup)
    command = f"run there, in the checkout: {node_command(setup.rendezvous, name)}"
    if not known:
        raise MachineMissing(f"Machine {name} has not joined the rendezvous at {setup.rendezvous}: {command}")
    where, _, port = known.rpartition(":")
    own, sock = own_hello(socket.gethostname()), None
    try:
        sock = socket.create_connection((where.strip("[]"), int(port)), timeout=setup.lost_s)
        theirs = shake_hands(sock, setup.secret, COMFYUI, own, setup.lost_s)
        fault = version_conflict(name, theirs, own)
    except SecretRefused as error:
        fault = (
            f"Machine {name} at {known} refused the exchange of secrets ({error}): set the same"
            f" {SECRET_VARIABLE} on every machine."
        )
    except OSError as error:
        fault = (
            f"Machine {name} does not answer at {known} ({error}): check that the network reaches it, or"
            f" {command}"
        )
    if not sock or fault:
        if sock:
            sock.close()
        raise MachineMissing(fault)
    notice_loss(sock, setup.lost_s)
    return RemoteMachine(name, ranks, sock, arena)


def leader_address(name: str, setup: RankSetup) -> str:
    """Returns the leader's ADDRESS:PORT; empty if the machine has not joined. Raises
    MachineMissing, LayoutError.
    """
    address, port = check_rendezvous(setup, name)
    try:
        return find(open_store(address, port, setup.lost_s), name)
    except RuntimeError as error:
        raise MachineMissing(
            f"Nothing answers at the rendezvous {setup.rendezvous} ({str(error).splitlines()[0]}): "
            f"run on every machine, in the checkout: {node_command(setup.rendezvous)}"
        ) from error


class RemoteMachine:
    """The ranks of one other machine, over the ``link`` to its leader. The parts of ComfyUI's arena
    that they read are sent there; their outputs, and their lines of the board, are copied back.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], sock: socket.socket, arena: Arena):
        self.name = name
        self.ranks = ranks
        self.own_address = sock.getsockname()[0]
        self.link = Link(sock, FromMachine)
        self._arena = arena
        self._ended: dict[int, Ended] = {}
        # Of conditioning that is there, the latest last; of what is forgotten, it goes there again
        self._versions: dict[int, None] = {}
        # The latest arguments that are there: patches of an evaluation have the same ones
        self._arguments: deque[bytes] = deque(maxlen=16)

    def open(self, placement: Placement, setup: RankSetup, meeting: str, arena_bytes: int) -> None:
        """Has the leader start its ranks; each will say Ready. Raises MachineMissing."""
        opening = Open(
            machine=self.name,
            degrees=placement.layout.degrees(),
            devices=tuple(device.name for device in placement.devices),
            backend=placement.backend,
            meeting=meeting,
            comfy_args=encode_plain(setup.comfy_args),
            arena_bytes=arena_bytes,
            speeds=placement.speeds,
        )
        try:
            self.link.send(opening)
        except ChannelClosed as error:
            raise MachineMissing(
                f"Machine {self.name} was lost before its ranks could start ({error}): run again."
            ) from error

    def send(
        self, request: Request, group: Sequence[int], fds: Sequence[int], before_piece: Callable[[], None]
    ) -> None:
        """Sends a request once for all ranks of ``group``, which are on that machine. The board
        shows the request at once, because the ranks' next message may never come.
        """
        for rank in group:
            self._arena.board.enter(rank, PHASE[type(request)], request.request)
        is_forward = isinstance(request, Forward)
        new = self._lacking(request.arguments) if is_forward else ()
        pieces = tuple((ref.offset, ref.nbytes) for ref in new)
        ranges = [(self._arena.segment.fd, *piece) for piece in pieces]
        message = ForRanks(tuple(group), request, pieces, self._arena.nbytes if is_forward else 0)
        self.link.send(message, fds, before_piece, ranges)
        if new and is_forward:
            self._versions |= dict.fromkeys(ref.version for ref in new if ref.version)
            for version in list(self._versions)[:-MOST_VERSIONS]:
                del self._versions[version]
            self._arguments.append(request.arguments)

    def _lacking(self, arguments: bytes) -> Collection[TensorRef]:
        """Returns the tensors that an evaluation names and that the other machine lacks. A tensor
        with a version is sent once.
        """
        if not arguments or any(known is arguments for known in self._arguments):
            return ()
        new: dict[int, TensorRef] = {}

        def note(ref: TensorRef) -> torch.Tensor:
            if ref.nbytes and ref.version not in self._versions:
                new[ref.offset] = ref
            return NO_TENSOR

        decode_tree(arguments, note)
        return new.values()

    def pump(self) -> list[tuple[int, Any]]:
        """Reads once: each message with the rank that sent it; None in its place for a rank that
        has ended. Raises ChannelClosed, MachineMissing, msgspec.DecodeError.
        """
        said: list[tuple[int, Any]] = []
        for message, fds in self.link.pump():
            if isinstance(message, Denied):
                raise MachineMissing(f"Machine {self.name} cannot start its ranks: {message.text}")
            if isinstance(message, Beat):
                for rank, line in message.lines.items():
                    if rank in self.ranks:
                        self._arena.board.copy_line(rank, line)
            elif message.rank in self.ranks:
                if isinstance(message, Ended):
                    self._ended[message.rank] = message
                else:
                    self._arena.board.enter(message.rank, "waiting")
                said.append(
                    (message.rank, None if isinstance(message, Ended) else self._kept(message.message, fds))
                )
            close_all(fds)
        return said

    def _kept(self, answer: Any, fds: Sequence[int]) -> Any:
        """Puts a received output into the arena. Returns the answer, or a failure if there is no
        room. After a failure the other machine counts as having no tensor, because it may have had
        no room.
        """
        if isinstance(answer, Done) and (fds or answer.apart is not None):
            try:
                if self.link.no_room is not None:
                    raise self.link.no_room
                if fds:
                    self._arena.segment.fill([answer.wrote], fds[0])
            except SharedMemoryFull as error:
                text, number, memory = str(error), answer.request, answer.memory
                answer = Failed(
                    request=number,
                    kind="error",
                    phase="sending",
                    text=text,
                    memory=memory,
                    at=(0, 0),
                    complete=True,
                )
        if isinstance(answer, Failed):
            self._versions.clear()
            self._arguments.clear()
        return answer

    def has_news(self) -> bool:
        """True if there is something to read: between requests, only the loss of the machine."""
        if self.link.fileno() < 0:  # another thread has just closed the pool
            return True
        poller = select.poll()
        poller.register(self.link.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def exit_of(self, rank: int, wait_s: float = 0) -> int | None:
        """Returns the exit status that the leader told; None if the rank is not known to have
        ended.
        """
        return self._ended[rank].status if rank in self._ended else None

    def tail(self, rank: int) -> list[str]:
        return list(self._ended[rank].tail) if rank in self._ended else [f"(on machine {self.name})"]
