"""ComfyUI's process and all ranks of a pool in one process, each with a late GPU (late_ranks.py).
The client, the pool's conversation, the wire, the ranks' loop and methods are the product's own.

What the client gives back of the arena is overwritten at once.
"""

import os
import select
import socket
from functools import partial
from types import SimpleNamespace

import pytest
from pipemesh.parallel_runtime.client.remote_pool import RemotePool
from pipemesh.parallel_runtime.client.run import PooledModel
from pipemesh.parallel_runtime.client.session import Resident, ResidentState
from pipemesh.parallel_runtime.methods.factory import make_method
from pipemesh.parallel_runtime.methods.recordings import Recordings
from pipemesh.parallel_runtime.wire.arena import ROOM, Board
from pipemesh.parallel_runtime.wire.channel import Channel
from pipemesh.parallel_runtime.wire.messages import Close, FromRank, Memory, ToRank
from pipemesh.parallel_runtime.wire.segment import Segment, TensorRef
from pipemesh.parallel_runtime.worker import rank_loop
from pipemesh.parallel_runtime.worker.arena_io import ArenaIO
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler
from pipemesh.pool.devices import place
from pipemesh.pool.pool import WorkerPool

from .fake_pools import fake_setup
from .joint_model import PLAN, Model
from .late_device import late_device
from .late_queues import Stuck
from .late_ranks import LateRank, LateWorld, Process

TURNS = 20_000  # in which no message comes and nothing is computed


class PatientChannel(Channel):
    """A rank's. While nothing has come, others go on."""

    def pump(self):
        while not select.select([self], [], [], 0)[0]:
            self.world.give_way(None)
        self.world.idle_turns = 0
        return super().pump()


class Ranks:
    """The pool's ranks, in the place of processes."""

    fault, are_killed = "", False

    def __init__(self, world):
        pairs = [socket.socketpair() for _ in range(world.layout.world_size)]
        self.channels = [Channel(ours, FromRank) for ours, _ in pairs]
        self.theirs = [PatientChannel(theirs, ToRank) for _, theirs in pairs]
        self._world = world
        for channel in self.theirs:
            channel.world = world

    def send(self, request, group, fds, check):
        for rank in group:
            self.channels[rank].send(request, fds)

    def cancel(self, number):
        self._world.pool.arena.board.cancel(number)

    def check(self, owing):
        pass  # no other machine

    def listen(self, wait_s):
        self._world.give_way(None)
        readable = select.select(self.channels, [], [], 0)[0]
        return [
            (rank, message)
            for rank, channel in enumerate(self.channels)
            if channel in readable
            for message, _ in channel.pump()
        ]

    def has_lost_one(self, idle):
        return False

    def last_lines(self, rank):
        return ""

    def stop(self, grace_s):
        """A pool that fails: the test tells of it."""


class PoolWorld(LateWorld):
    """``ui(remote)``: what ComfyUI's process does; ``prepare(rank, model)``: what is odd there.
    ``models``: the names under which ranks hold one and the same. ``worth``: from how many
    evaluations on they record CUDA graphs; None: they record none.
    """

    idle_turns = done = 0
    models = ("m",)
    worth = None

    def __init__(self, layout, box, monkeypatch, ui, prepare):
        super().__init__(layout, box, monkeypatch)
        self._ui, self._prepare = ui, prepare
        self.pool = WorkerPool(place(layout, "cpu", "gloo", ()), fake_setup())
        self.ranks = self.pool.ranks = self.pool._conversation._ranks = Ranks(self)
        self.pool._life, self.pool.memory = "ready", [Memory(0, 0, 0)] * layout.world_size
        arena = self.pool.arena
        give = arena.give

        def overwritten(offset, nbytes):
            arena.segment.tensor(TensorRef(offset, (nbytes,), "uint8")).fill_(255)
            give(offset, nbytes)

        monkeypatch.setattr(arena, "give", overwritten)
        monkeypatch.setattr(rank_loop, "LOOK_S", 0)
        # A rank's thread is its process's main one
        monkeypatch.setattr(
            rank_loop, "threading", SimpleNamespace(current_thread=lambda: 0, main_thread=lambda: 0)
        )

    def give_way(self, op):
        self.idle_turns = self.idle_turns + 1 if self.done == self.box.done else 0
        self.done = self.box.done
        if self.idle_turns > TURNS:
            raise Stuck("everybody waits for a message")
        super().give_way(op)

    def started(self, work):
        return [*super().started(work), Process(partial(LateRank, self, 0, self._use), self.box)]

    def _use(self, _mesh, run):
        run.gpu = self.box.own
        handle = SimpleNamespace(layout=self.layout, ensure=lambda *_: self.pool, live=lambda: self.pool)
        remote = RemotePool(handle)
        session = remote.sessions.open(lambda: False)
        for name in self.models:
            model = remote.residency.models[name] = PooledModel(name, name, users=1)
            session.models[model] = Resident(state=ResidentState.READY)
        self._ui(remote)
        for channel in self.ranks.channels:
            channel.send(Close())

    def serve(self, mesh, run):
        arena, device = self.pool.arena.segment, run.gpu.device
        segment = Segment(os.dup(arena.fd), arena.nbytes, ROOM)
        segment.pin(device)
        memory = DeviceMemory(device, mesh.rank)
        loop = rank_loop.RankLoop(self.ranks.theirs[mesh.rank], Board(segment), mesh.rank, memory, device)
        run.wants_stop = loop.wants_stop
        handler = RequestHandler(mesh, device, memory, ArenaIO(segment, device))
        model = Model(4)
        recordings = None
        if self.worth is not None:
            recordings = Recordings(model, mesh.sequence, loop.tick, worth=self.worth)
        tick = None if recordings is None else recordings.tick
        method = make_method(model, PLAN, mesh, loop, tick=tick)
        model.to(device)
        method.attach()
        self._prepare(mesh.rank, model)

        def compute(arguments, number):
            return method.forward(model, arguments, number)

        def replaying(arguments, number):
            return recordings.evaluate(arguments, partial(compute, number=number), method.forget)

        held = SimpleNamespace(
            method=method,
            patches_id="",
            kept=None,
            begin=method.begin,
            recordings=recordings,
            on_rank=compute if recordings is None else replaying,
            nbytes=0,
        )
        handler.models |= dict.fromkeys(self.models, held)
        loop.serve(handler)
        segment.close()


def pooled(
    layout,
    ui,
    seed=0,
    *,
    at_once=False,
    pins=None,
    prepare=lambda rank, model: None,
    models=("m",),
    worth=None,
):
    """Has ``ui`` use a pool; returns its ranks' GPUs. ``pins``: whether its arena is pinned; else
    it is so at even seeds.
    """
    with pytest.MonkeyPatch.context() as patch, late_device(seed, at_once) as box:
        box.registers = seed % 2 == 0 if pins is None else pins
        world = PoolWorld(layout, box, patch, ui, prepare)
        world.models, world.worth = models, worth
        try:
            world.run(world.serve)
            return world.gpus
        finally:
            for channel in (*world.ranks.channels, *world.ranks.theirs):
                channel.close()
            world.pool.arena.close()
