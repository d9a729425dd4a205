"""The ranks of one machine: their processes, and a channel to each. ComfyUI's pool has one; on
every other machine its leader has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..parallel_runtime.wire.channel import Channel, ChannelClosed
from ..parallel_runtime.wire.messages import FromRank, Meeting, Start
from ..parallel_runtime.wire.segment import Segment
from ..parallel_runtime.wire.tree import encode_plain
from .devices import CUDA_VARIABLE, HIP_VARIABLE, Device, Placement
from .rank_setup import ALLOCATOR, COLLECTIVE_TIMEOUT_S, KEEP_MEMORY, SECRET_VARIABLE, RankSetup
from .supervisor import Command, Supervisor

ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
OF_GPUS = {
    # NCCL's watchdog would end a rank before it answers with its GPU's error
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the pool itself judges who hangs
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # torch 2.7.0 chooses 1, with which NCCL 2.26 may hang
    # Kernels of all communicators start in the order of the code, which all ranks have in common
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LOOPBACK = "lo"
WSL = Path("/dev/dxg")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_")
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Net:
    """The meeting place of the ranks of several machines, and this machine's network interface that
    leads there.
    """

    meeting: Meeting
    interface: str


def rank_environment(
    device: Device, backend: str, environ: dict[str, str], interface: str = ""
) -> dict[str, str]:
    """Returns a rank's environment: the starting process's variables without the ones that break a
    rank (ComfyUI's allocator, other launchers' ranks, hidden GPUs), plus the variables that a GPU
    needs and that the user has not set. ``interface`` is the network interface to other machines;
    without it, ports of the ranks are open to this machine alone.

    A CPU rank keeps up to 1 GiB of freed memory (glibc), because fresh pages would cost it a
    quarter of a forward. The memory goes back to the system when a model is released, and when a
    run of a pipeline ends.
    """
    scrubbed = {*ALLOCATORS, *LAUNCHER_VARIABLES, SECRET_VARIABLE, CUDA_VARIABLE, HIP_VARIABLE}
    env = {
        key: value
        for key, value in environ.items()
        if key not in scrubbed and not key.startswith(LAUNCHER_PREFIXES)
    }
    defaults = {**OF_GPUS, **allocator(device, environ)} if device.is_gpu else KEEP_MEMORY
    env = {**defaults, **env}
    env[device.variable] = device.visible if device.is_gpu else ""
    env["GLOO_SOCKET_IFNAME"] = interface or LOOPBACK
    return {"NCCL_SOCKET_IFNAME": interface, **env} if interface else {**env, "NCCL_SOCKET_IFNAME": LOOPBACK}


def allocator(device: Device, environ: dict[str, str]) -> dict[str, str]:
    """Returns the settings of torch's own allocator: the user's, of which ComfyUI has joined its
    choice of another (``cuda_malloc.py``) to the end; else, on NVIDIA's GPUs, that segments grow,
    so that less is lost between tensors of a run's sizes and of the next one's. Not under WSL,
    whose driver may fail at it (pytorch issue 192330).
    """
    for name in ALLOCATORS:
        parts = environ.get(name, "").split(",")
        if own := ",".join(part for part in parts if not part.strip().startswith("backend:")):
            return {name: own}
    grow = device.variable == CUDA_VARIABLE and not WSL.exists()
    return {ALLOCATOR: "expandable_segments:True"} if grow else {}


class Crew:
    """The ranks of ``placement`` on ``machine``. Not started until ``start``."""

    def __init__(self, placement: Placement, machine: str, setup: RankSetup):
        self.ranks = placement.ranks_on(machine)
        self.channels: dict[int, Channel] = {}
        self.supervisor = Supervisor(setup.start)
        self._placement = placement
        self._setup = setup

    def start(self, arena: Segment, net: Net | None) -> None:
        """Starts the processes and sends each its first message. Raises OSError.

        Only the rank itself holds the other end of its socket, so that its death closes the socket.
        """
        store = os.memfd_create("pipemesh-store", os.MFD_CLOEXEC)
        theirs: dict[int, socket.socket] = {}
        try:
            for rank in self.ranks:
                ours, theirs[rank] = socket.socketpair()
                self.channels[rank] = Channel(ours, FromRank)
            self.supervisor.start({rank: self._command(rank, sock, net) for rank, sock in theirs.items()})
            for rank, channel in self.channels.items():
                # It has ended: that is told, with its rank, when its channel is read
                with contextlib.suppress(ChannelClosed):
                    channel.send(self._first_message(rank, arena.nbytes, net), [arena.fd, store])
        finally:
            os.close(store)
            for other in theirs.values():
                other.close()

    def _command(self, rank: int, sock: socket.socket, net: Net | None) -> Command:
        interface = net.interface if net else ""
        env = rank_environment(
            self._placement.devices[rank], self._placement.backend, dict(os.environ), interface
        )
        return Command(self._setup.argv, env, sock.fileno())

    def _first_message(self, rank: int, arena_bytes: int, net: Net | None) -> Start:
        device = self._placement.devices[rank]
        return Start(
            rank=rank,
            degrees=self._placement.layout.degrees(),
            device=device.local_name,
            backend=self._placement.backend,
            threads=self._placement.threads(rank),
            cores=self._placement.cores(rank),
            timeout_s=COLLECTIVE_TIMEOUT_S,
            comfyui=self._setup.comfyui,
            comfy_args=encode_plain({**self._setup.comfy_args, **({} if device.is_gpu else {"cpu": True})}),
            arena_bytes=arena_bytes,
            log_level=logging.WARNING if log.getEffectiveLevel() >= logging.INFO else logging.DEBUG,
            machines=self._placement.machines,
            sharers=self._placement.sharers(rank),
            speeds=self._placement.speeds,
            times_itself=self._placement.times_devices,
            times_links=self._setup.times_links(self._placement),
            meeting=net.meeting if net else None,
        )

    def stop(self, grace_s: float) -> None:
        """Waits ``grace_s`` for the ranks to leave by themselves, then ends them, and closes their
        channels. Safe if they were never started.
        """
        self.supervisor.stop(grace_s)
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
