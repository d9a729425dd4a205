"""ComfyUI's end of another machine: found through torchrun's rendezvous, spoken to over one
connection that lasts as long as the pool.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ...parallel_runtime.errors import LayoutError, PipeMeshError
from ...parallel_runtime.wire.arena import Board
from ...parallel_runtime.wire.channel import ChannelClosed
from ...parallel_runtime.wire.messages import PHASE, Beat, Close, Denied, Ended, FromMachine, Meeting, Open, Request
from ...parallel_runtime.wire.tcp import Link, SecretRefused, notice_loss, prove
from ...parallel_runtime.wire.tree import encode_tree
from .crew import SECRET_VARIABLE, Net, RankSetup, no_tensor, seconds
from .devices import Placement

RENDEZVOUS_VARIABLE, LOST_VARIABLE = "PIPEMESH_RDZV", "PIPEMESH_LOST_S"
DEFAULT_LOST_S, LOST_S_RANGE = 5.0, (2.0, 120.0)  # the kernel counts up to 127 unanswered probes, one a second
FINISH_S = 5.0
SHORTEST_SECRET = 16
SIOCGIFADDR = 0x8915
NODE_COMMAND = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 "
    "--rdzv-conf=read_timeout=600 --rdzv-backend=c10d --rdzv-endpoint={rendezvous} -m launcher node"
)


class MachineMissing(PipeMeshError):
    """Another machine's ranks cannot be had; the sentence says why."""


def between_machines(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of RankSetup that pools over several machines need. Raises LayoutError."""
    return {
        "rendezvous": environ.get(RENDEZVOUS_VARIABLE, ""),
        "secret": environ.get(SECRET_VARIABLE, ""),
        "lost_s": seconds(environ, LOST_VARIABLE, DEFAULT_LOST_S, LOST_S_RANGE),
    }


def check_rendezvous(setup: RankSetup, name: str) -> tuple[str, int]:
    """The rendezvous as address and port. Raises LayoutError unless the setup says where
    machines meet and holds a secret. ``name``: of the machine to be met.
    """
    address, _, port = setup.rendezvous.rpartition(":")
    if not (address and port.isdigit()):
        raise LayoutError(
            f"Machine {name} is met at torchrun's rendezvous, and {RENDEZVOUS_VARIABLE} is {setup.rendezvous or 'not set'}: "
            f"start with {RENDEZVOUS_VARIABLE}=ADDRESS:PORT, the --rdzv-endpoint (docs/MULTI_NODE.md)."
        )
    if len(setup.secret) < SHORTEST_SECRET:
        raise LayoutError(
            f"{SECRET_VARIABLE} has {len(setup.secret)} characters and machines trust each other by it: "
            f"start with the same {SECRET_VARIABLE} of at least {SHORTEST_SECRET} on every machine."
        )
    return address, int(port)


def node_command(rendezvous: str, name: str = "") -> str:
    """The same on every machine unless it is for the one of that name."""
    return NODE_COMMAND.format(nodes="MACHINES", rendezvous=rendezvous) + (f" --name {name}" if name else "")


def open_store(address: str, port: int, timeout_s: float) -> Any:
    """A client of the store that torchrun keeps at its rendezvous endpoint. Raises RuntimeError
    where there is none.
    """
    import torch.distributed as dist

    return dist.TCPStore(address, port, timeout=timedelta(seconds=timeout_s))


def store_key(name: str) -> str:
    return f"pipemesh/machines/{name}"


def new_meeting() -> str:
    return f"pipemesh/pools/{secrets.token_hex(8)}"


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address. Raises MachineMissing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise MachineMissing(
        f"No network interface here has {address} as its first address: set GLOO_SOCKET_IFNAME to the one between the machines."
    )


def net_for(setup: RankSetup, own_address: str, meeting: str) -> Net:
    """``own_address``: by which this machine speaks to the others."""
    address, port = check_rendezvous(setup, own_address)
    return Net(Meeting(address, port, meeting), os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(own_address))


def join(name: str, ranks: tuple[int, ...], setup: RankSetup, board: Board) -> RemoteMachine:
    """Connects to the leader of machine ``name``. Raises MachineMissing, and LayoutError where the
    setup names no rendezvous.
    """
    address, port = check_rendezvous(setup, name)
    try:
        store = open_store(address, port, setup.lost_s)
        known = store.get(store_key(name)).decode() if store.check([store_key(name)]) else ""
    except RuntimeError as error:
        raise MachineMissing(
            f"Nothing answers at the rendezvous {setup.rendezvous} ({str(error).splitlines()[0]}): "
            f"run on every machine, in the checkout: {node_command(setup.rendezvous)}"
        ) from error
    command = f"run there, in the checkout: {node_command(setup.rendezvous, name)}"
    if not known:
        raise MachineMissing(f"Machine {name} has not joined the rendezvous at {setup.rendezvous}: {command}")
    where, _, at = known.rpartition(":")
    try:
        sock = socket.create_connection((where, int(at)), timeout=setup.lost_s)
    except OSError as error:
        raise MachineMissing(
            f"Machine {name} does not answer at {known} ({error}): see that the network reaches it, or {command}"
        ) from error
    try:
        prove(sock, setup.secret, b"ui")
    except OSError as error:
        sock.close()
        kind = "refused" if isinstance(error, SecretRefused) else "did not finish"
        sentence = f"Machine {name} at {known} {kind} the exchange of secrets ({error}): set the same {SECRET_VARIABLE} on every machine."
        raise MachineMissing(sentence) from error
    sock.settimeout(None)
    notice_loss(sock, setup.lost_s)
    return RemoteMachine(name, ranks, sock, board)


class RemoteMachine:
    """The ranks of one other machine. What they write on their board is copied onto ComfyUI's."""

    def __init__(self, name: str, ranks: tuple[int, ...], sock: socket.socket, board: Board):
        self.name = name
        self.ranks = ranks
        self.own_address = sock.getsockname()[0]
        self._link = Link(sock, FromMachine)
        self._board = board
        self._ended: dict[int, Ended] = {}

    def fileno(self) -> int:
        return self._link.fileno()

    def open(self, placement: Placement, setup: RankSetup, meeting: str, arena_bytes: int) -> None:
        """Has the leader start its ranks; each will say Ready. Raises MachineMissing."""
        opening = Open(
            machine=self.name,
            degrees=placement.layout.degrees(),
            devices=tuple(device.name for device in placement.devices),
            backend=placement.backend,
            meeting=meeting,
            comfy_args=encode_tree(setup.comfy_args, no_tensor),
            arena_bytes=arena_bytes,
        )
        try:
            self._link.send(opening)
        except ChannelClosed as error:
            raise MachineMissing(f"Machine {self.name} was lost before its ranks could start ({error}): run again.") from error

    def send(self, message: Request | Close, fds: Any = (), before_piece: Callable[[], None] = lambda: None) -> None:
        """Once, for all ranks there. The board says at once what they were asked: the next word
        from there may never come.
        """
        for rank in self.ranks if type(message) in PHASE else ():
            self._board.enter(rank, PHASE[type(message)], message.request)
        self._link.send(message, fds, before_piece)

    def pump(self) -> list[tuple[int, Any]]:
        """Reads once: what ranks there said, None for one that has ended. Raises ChannelClosed,
        MachineMissing, msgspec.DecodeError.
        """
        said: list[tuple[int, Any]] = []
        for message, _fds in self._link.pump():
            if isinstance(message, Denied):
                raise MachineMissing(f"Machine {self.name} cannot start its ranks: {message.text}")
            if isinstance(message, Beat):
                for rank, line in message.lines.items():
                    if rank in self.ranks:
                        self._board.copy_line(rank, line)
            elif message.rank in self.ranks:
                if isinstance(message, Ended):
                    self._ended[message.rank] = message
                else:
                    self._board.enter(message.rank, "waiting")
                said.append((message.rank, None if isinstance(message, Ended) else message.message))
        return said

    def has_news(self) -> bool:
        """Whether there is something to read. Asked between requests, when only a loss is news."""
        if self._link.fileno() < 0:  # another thread has just closed the pool
            return True
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def exit_of(self, rank: int, wait_s: float = 0) -> int | None:
        return self._ended[rank].status if rank in self._ended else None

    def tail(self, rank: int) -> list[str]:
        return list(self._ended[rank].tail) if rank in self._ended else [f"(on machine {self.name})"]

    def close(self, wait_s: float = FINISH_S) -> None:
        """The leader ends its ranks when the connection closes; it is given ``wait_s`` to say that
        it has.
        """
        self._link.finish(wait_s)
