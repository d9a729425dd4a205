"""Runs a rank: takes its first message, imports ComfyUI, meets the other ranks, and handles
requests until the UI closes the channel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from dataclasses import replace
from datetime import timedelta

from ..comm.cores import bus_of, cores_near, giving_way, keep_to
from ..wire.arena import ROOM, Board
from ..wire.channel import Channel, ChannelClosed
from ..wire.messages import Ready, Start
from ..wire.segment import Segment
from ..wire.tree import decode_tree


def watch_parent(channel: Channel) -> None:
    """Ends this process when the UI's end of the socket closes, in a thread of its own: the main
    one may be deep in a collective.
    """
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLHUP)

    def wait() -> None:
        while not any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poller.poll()):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="pipemesh-parent", daemon=True).start()


def run_rank(channel: Channel) -> None:
    watch_parent(channel)
    start, (arena_fd, *store_fds) = channel.receive()
    assert isinstance(start, Start)
    logging.basicConfig(level=start.log_level, format="%(message)s")
    arena = Segment(arena_fd, start.arena_bytes, ROOM)
    board = Board(arena)
    board.enter(start.rank, "importing")
    if start.cores:
        keep_to(start.cores)

    import torch

    from .preparation import multiply_alike, prepare

    device, ranks = torch.device(start.device), math.prod(start.degrees.values())
    prepare(start.comfyui, decode_tree(start.comfy_args, arena.tensor), ranks, device)
    import torch.distributed as dist
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore

    from ..attention.kernels import TORCHS
    from ..attention.trial import tried_kernels, usual
    from ..comm.connections import try_connections
    from ..comm.link_speed import link_speeds
    from ..comm.mesh import connect
    from ..layout import Layout
    from ..methods.recordings import why_unrecorded
    from .arena_io import ArenaIO
    from .device_memory import DeviceMemory
    from .handler import RequestHandler
    from .own_speed import flops_per_s
    from .rank_loop import RankLoop, look_rarely

    torch.set_num_threads(start.threads)
    if device.type == "cuda":
        keep_to(cores_near(bus_of(torch.cuda.get_device_properties(device))))
        arena.pin(device)
    board.enter(start.rank, "joining")
    layout = Layout(**start.degrees)
    memory = DeviceMemory(device, start.rank, start.sharers)
    loop = RankLoop(channel, board, start.rank, memory, device, spins=start.threads > 1)
    size = layout.world_size
    joining = giving_way if start.cores else contextlib.nullcontext
    with joining():
        if size > 1:
            # The store is a memfd too: each rank opens it through its own descriptor, nothing is
            # left on disk
            if start.meeting is None:
                store = FileStore(f"/proc/self/fd/{store_fds[0]}", size)
            else:
                store = PrefixStore(start.meeting.name, TCPStore(start.meeting.address, start.meeting.port))
            timeout = timedelta(seconds=start.timeout_s)
            own_gpu = device if start.backend == "nccl" else None  # NCCL connects at once then
            dist.init_process_group(
                start.backend,
                store=store,
                rank=start.rank,
                world_size=size,
                timeout=timeout,
                device_id=own_gpu,
            )
            multiply_alike(store, start.rank, size)
        mesh = connect(
            layout,
            start.rank,
            device=device if start.backend == "nccl" else torch.device("cpu"),
            via_cpu=start.backend == "gloo" and device.type == "cuda",
            wants_stop=loop.wants_stop,
            tick=lambda steps: board.tick(start.rank, steps),
            speeds=start.speeds,
        )
        mesh = replace(mesh, unrecorded=why_unrecorded(mesh.sequence.device, os.environ))
        try_connections(mesh, start.machines)
        links = link_speeds(mesh) if start.times_links else ()
    kernels = (
        tried_kernels(device) if layout.merges_parts else TORCHS
    )  # elsewhere ComfyUI's own attention computes
    io = ArenaIO(arena, device)
    handler = RequestHandler(mesh, device, memory, io, start.machines, kernels, joining)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    kernel = usual(kernels, device) if layout.merges_parts else ""
    speed = flops_per_s(device) if start.times_itself else 0.0
    memory.empty_cache()
    channel.send(
        Ready(
            device_name=name,
            memory=memory.now(),
            kernel=kernel,
            refused_kernels=kernels.refused,
            flops_per_s=speed,
            links=links,
        )
    )
    look_rarely()
    with contextlib.suppress(ChannelClosed):
        loop.serve(handler)
    if size > 1:
        dist.destroy_process_group()
