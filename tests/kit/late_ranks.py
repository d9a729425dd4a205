"""All ranks of a layout in one process, each with a late GPU of its own (late_device.py), and NCCL
between them: a message waits in queues, and no call waits for another rank.

A collective is done when the queues of all members have come to it, a message when those of both
ends have. One that blocks is in the caller's own stream, or in the group's, to which the caller's
is joined. One that does not is in the group's, behind all that the caller has asked for; ``wait``
has the caller's stream wait.
"""

from contextlib import suppress
from functools import partial
from threading import Semaphore, Thread

import torch
from greenlet import getcurrent

from .collectives import RankRun, World
from .late_device import on_this_thread, poison
from .late_queues import Gpu, Stuck


def own_gpu():
    """The device of the process at hand."""
    return torch.device("cuda", torch.cuda.current_device())


class Meeting:
    """What ``size`` queues come to together. ``happen``: is given what each brought."""

    def __init__(self, size, happen):
        self.size, self.happen = size, happen
        self.here = {}
        self.is_over = False

    def arrive(self, rank, receiving, sending):
        own = {piece.data_ptr() for piece in sending}  # in place, where NCCL leaves it
        for place in receiving:
            if place.data_ptr() not in own:
                poison(place)  # from now on it may be written
        self.here[rank] = receiving, sending
        if len(self.here) == self.size:
            self.happen(self.here)
            self.is_over, self.here = True, None


class Work:
    def __init__(self, op):
        self.op = op

    def wait(self):
        gpu = getcurrent().gpu
        gpu.join(self.op)
        gpu.box.pass_time()


class Waiting:
    """What the world waits for before a rank goes on: until then others do."""

    def __init__(self, box, op):
        self.box, self.op = box, op

    @property
    def done(self):
        return self.op.is_over or self.box.can_move()


class LateRank(RankRun):
    def __init__(self, world, rank, work):
        super().__init__(world, rank, work)
        self.gpu = world.gpus[rank]


class Process:
    """A rank as the world switches to it, in a thread of its own: where it waits, torch may be amid
    an operation. One thread at a time goes on.
    """

    def __init__(self, start, box):
        self._start, self._box = start, box
        self._turn, self._over = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._left_with, self._error = None, None
        self.run, self.dead = None, False

    def __getattr__(self, name):
        return getattr(self.run, name)

    def switch(self):
        if not self._thread.ident:
            self._thread.start()
        self._turn.release()
        self._over.acquire()
        if self._error is not None:
            raise self._error
        return self._left_with

    def end(self):
        """Unwinds it where it stands."""
        while self._thread.ident and not self.dead:
            self._box = None
            with suppress(BaseException):
                self.switch()

    def _run(self):
        self._turn.acquire()
        try:
            with on_this_thread(self._box):
                self.run = self._start()
                self._left_with = self.run.switch()
                while not self.run.dead:
                    self._over.release()
                    self._turn.acquire()
                    self._left_with = self.run.switch() if self._box is not None else self.run.throw()
        except BaseException as error:  # noqa: BLE001 it is raised where the world goes on
            self._error = error
        self.dead = True
        self._over.release()


class LateWorld(World):
    """``box`` has the ranks' GPUs. Over gloo, messages go through pinned memory of the CPU."""

    def __init__(self, layout, box, monkeypatch, backend="nccl", speeds=()):
        self.box = box
        self.via_cpu = backend == "gloo"
        self.gpus = [Gpu(box, torch.device("cuda", rank)) for rank in range(layout.world_size)]
        self._meetings = {}
        box.give_way = self.give_way
        super().__init__(layout, backend, monkeypatch, speeds)

    def _join(self, rank, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(self.box, "own", self.gpus[rank])
            return super()._join(rank, monkeypatch)

    def device_of(self, rank):
        return super().device_of(rank) if self.via_cpu else self.gpus[rank].device

    def give_way(self, op):
        """Lets other ranks go on until a queue can move, or for a while."""
        run = getcurrent()
        if not isinstance(run, RankRun):
            raise Stuck("nobody else can go on")
        run.parent.switch(None if op is None else Waiting(self.box, op))

    def started(self, work):
        return [
            Process(partial(LateRank, self, rank, work), self.box) for rank in range(self.layout.world_size)
        ]

    def run(self, work, choose=None):
        try:
            traces = super().run(work, choose or self.box.scheduler.random.choice)
        finally:
            for process in self.runs:
                process.end()
        self.box.finish()
        return traces

    # -- torch.distributed

    def _meeting(self, key, size, happen):
        """That of ``key`` which this rank has not come to."""
        number = self._met[key, getcurrent().rank]
        self._met[key, getcurrent().rank] += 1
        return self._meetings.setdefault((key, number), Meeting(size, happen))

    def _ask(self, name, run, tensors, meetings, is_async):
        """Puts an operation of a group into a queue; ``run`` arrives at the meetings."""
        gpu, box = getcurrent().gpu, self.box
        gpu.require_no_recording("a message")
        gpu.launches[name] += 1
        how = {"run": run, "meetings": meetings, "holds": [one.memory for one in tensors]}
        if not is_async and not box.scheduler.joins:
            gpu.current.push(**how)
            box.pass_time()
            return None
        op = gpu.stream_of(name).push(needs=(gpu.current.last,), **how)
        if not is_async:
            gpu.join(op)
        box.pass_time()
        return Work(op) if is_async else None

    def all_to_all_single(self, receiving, sending, receive_sizes, send_sizes, group=None, async_op=False):
        if self.via_cpu:
            return super().all_to_all_single(receiving, sending, receive_sizes, send_sizes, group, async_op)
        name, rank = self.name_of(group), getcurrent().rank
        members = self.members[name]
        getcurrent().note("all_to_all", name, (*send_sizes, *receive_sizes))

        def happen(here):
            for place, one in enumerate(members):
                for other_place, other in enumerate(members):
                    here[one][0][other_place].copy_(here[other][1][place])

        meeting = self._meeting(name, len(members), happen)
        places, pieces = receiving.content.split(receive_sizes), sending.content.split(send_sizes)
        return self._ask(
            name, lambda: meeting.arrive(rank, places, pieces), (receiving, sending), (meeting,), async_op
        )

    def all_gather_into_tensor(self, whole, part, group, async_op):
        if self.via_cpu:
            return super().all_gather_into_tensor(whole, part, group, async_op)
        name, rank = self.name_of(group), getcurrent().rank
        members = self.members[name]
        getcurrent().note("all_to_all", name, (part.numel(),) * 2 * len(members))

        def happen(here):
            for place, other in enumerate(members):
                for one in members:
                    here[one][0][place].copy_(here[other][1][0])

        meeting = self._meeting(name, len(members), happen)
        places = whole.content.split(part.numel())
        return self._ask(
            name, lambda: meeting.arrive(rank, places, [part.content]), (whole, part), (meeting,), async_op
        )

    def _message(self, kind, tensor, peer, group):
        """The meeting of a message's two ends, and how this rank comes to it."""
        name, rank, content = self.name_of(group), getcurrent().rank, tensor.content
        getcurrent().note(kind, name, (tensor.numel(),), peer=peer)
        ends = (rank, peer) if kind == "send" else (peer, rank)

        def happen(here):
            here[ends[1]][0][0].copy_(here[ends[0]][1][0])

        meeting = self._meeting((name, *ends), 2, happen)
        brought = ([], [content]) if kind == "send" else ([content], [])
        return meeting, lambda: meeting.arrive(rank, *brought)

    def isend(self, tensor, to, group=None):
        if self.via_cpu:
            return super().isend(tensor, to, group)
        meeting, arrive = self._message("send", tensor, to, group)
        return self._ask(self.name_of(group), arrive, (tensor,), (meeting,), is_async=True)

    def irecv(self, tensor, sender, group=None):
        if self.via_cpu:
            return super().irecv(tensor, sender, group)
        meeting, arrive = self._message("receive", tensor, sender, group)
        return self._ask(self.name_of(group), arrive, (tensor,), (meeting,), is_async=True)
