"""Find the machines of a pool, and check that they have the same version: shared by ComfyUI's end
and a leader.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

from ..parallel_runtime.errors import LayoutError, PipeMeshError
from ..parallel_runtime.wire.messages import Meeting
from ..parallel_runtime.wire.tcp import Hello
from .crew import Net
from .package import VERSION
from .rank_setup import RENDEZVOUS_VARIABLE, SECRET_VARIABLE, RankSetup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SHORTEST_SECRET = 16
NODE_COMMAND = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 "
    "--rdzv-conf=read_timeout=600 --rdzv-backend=c10d --rdzv-endpoint={rendezvous} -m launcher node"
)


class MachineMissing(PipeMeshError):
    """Another machine's ranks are out of reach; the sentence says why."""


def check_rendezvous(setup: RankSetup, name: str) -> tuple[str, int]:
    """Returns the rendezvous as address and port. Raises LayoutError unless the setup says where
    machines meet and holds a secret. ``name``: of the machine to be met.
    """
    address, _, port = setup.rendezvous.rpartition(":")
    if not (address and port.isdigit()):
        raise LayoutError(
            f"Machine {name} is met at torchrun's rendezvous, and {RENDEZVOUS_VARIABLE} is"
            f" {setup.rendezvous or 'not set'}: start with {RENDEZVOUS_VARIABLE}=ADDRESS:PORT, the"
            " --rdzv-endpoint (docs/MULTI_NODE.md of the repository)."
        )
    if len(setup.secret) < SHORTEST_SECRET:
        raise LayoutError(
            f"{SECRET_VARIABLE} has {len(setup.secret)} characters, and machines trust each other by it: set"
            f" the same one of at least {SHORTEST_SECRET} characters on every machine."
        )
    return address.strip("[]"), int(port)


def node_command(rendezvous: str, name: str = "") -> str:
    """Returns the command to run on every machine; with ``name``, on the one that is called so."""
    return NODE_COMMAND.format(nodes="MACHINES", rendezvous=rendezvous) + (f" --name {name}" if name else "")


# -- torchrun's store


def open_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Returns a client of the store that torchrun keeps at its rendezvous. Raises RuntimeError
    if there is none.
    """
    import torch.distributed as dist

    return dist.TCPStore(address, port, timeout=timedelta(seconds=timeout_s))  # pyright: ignore[reportPrivateImportUsage]


def store_key(name: str) -> str:
    """Returns the key of a leader's address in the store. It never changes, so that versions that
    differ meet and say so.
    """
    return f"pipemesh/hosts/{name}"


def find(store: TCPStore, name: str) -> str:
    """Returns ADDRESS:PORT of the leader of that name; empty if none has joined."""
    key = store_key(name)
    return store.get(key).decode() if store.check([key]) else ""


def register(store: TCPStore, name: str, known: str) -> None:
    """Enters ``known``, ADDRESS:PORT, in the store as the leader of machine ``name``. A leader that
    is started again may have another port. Raises PipeMeshError if another machine has the name.
    """
    before = ""
    while (now := store.compare_set(store_key(name), before, known).decode()) != known:
        where = now.rpartition(":")[0]
        if where != known.rpartition(":")[0]:
            raise PipeMeshError(
                f"{name} is the machine at {where} already: give this one another --name, "
                f"or start torchrun anew on every machine if {name} has moved here."
            )
        before = now


# -- where ranks meet


def new_meeting() -> str:
    """Returns a name in the store that no other pool has."""
    return f"pipemesh/pools/{secrets.token_hex(8)}"


def interface_of(address: str) -> str:
    """Returns the network interface that has this address. Raises MachineMissing."""
    import psutil  # ComfyUI has it

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise MachineMissing(
        f"No network interface here has {address}: set GLOO_SOCKET_IFNAME to the one between the machines."
    )


def net_for(setup: RankSetup, own_address: str, meeting: str) -> Net:
    """Returns the meeting place, and the interface by which this machine's ranks reach the others.
    ``own_address`` is this machine's address towards them. Raises MachineMissing, LayoutError.
    """
    address, port = check_rendezvous(setup, own_address)
    return Net(
        Meeting(address, port, meeting), os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(own_address)
    )


# -- the version of both ends


def own_hello(machine: str) -> Hello:
    return Hello(version=VERSION, machine=machine)


def version_conflict(name: str, leader: Hello, comfyui: Hello) -> str:
    """Returns a sentence if the leader of machine ``name`` and ComfyUI have different versions of
    PipeMesh; empty if they agree.
    """
    if leader.version == comfyui.version:
        return ""
    return (
        f"Machine {name} has PipeMesh {leader.version} and ComfyUI's machine {comfyui.machine} has PipeMesh"
        f" {comfyui.version}: install the same version of PipeMesh on both."
    )
