"""All ranks of a layout in one process, each in its own greenlet, and a trace of what they ask of
torch.distributed.

A send is done when the other end has received it and not before, so that nothing depends on what a
transport buffers. The trace is judged apart from the run: a run shows one interleaving, the trace
shows all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from pipemesh.parallel_runtime.comm.mesh import connect


@dataclass(frozen=True)
class Event:
    """``counts`` are elements: of a message, or those that each member of the group sends to and
    receives from this rank.
    """

    rank: int
    group: str
    operation: str
    counts: tuple[int, ...]
    peer: int = -1
    waits_for: int = -1  # the place in this rank's trace of the operation that is waited for

    def __str__(self) -> str:
        return f"rank {self.rank} {self.operation} {self.counts} in {self.group}"


Traces = Sequence[Sequence[Event]]


class Stuck(AssertionError):
    """Every rank waits for another."""


class Operation:
    def __init__(self, rank, place, tensor=None):
        self.rank, self.place, self.tensor, self.done = rank, place, tensor, False

    def wait(self):
        getcurrent().note("wait", waits_for=self.place)
        while not self.done:
            getcurrent().parent.switch(self)


class RankRun(greenlet):
    def __init__(self, world: World, rank: int, work: Callable):
        super().__init__(lambda: work(world.meshes[rank], self))
        self.world, self.rank = world, rank
        self.trace: list[Event] = []
        self.wants_stop = lambda: False
        self.fails = lambda place: False

    def note(self, operation: str, group: str = "", counts: tuple[int, ...] = (), **more: int) -> int:
        self.trace.append(Event(self.rank, group, operation, counts, **more))
        return len(self.trace) - 1


class World:
    """Stands in for torch.distributed between the ranks of ``layout``. ``made`` are the groups that
    each rank made, in its order, ``opened`` what each sent in them before anything else. ``ticks``:
    the progress that each told. ``speeds`` of the ranks, as a mesh has them.
    """

    via_cpu = False

    def __init__(self, layout, backend: str, monkeypatch, speeds=()):
        self.layout, self.backend, self.speeds = layout, backend, speeds
        self.members: dict[str, tuple[int, ...]] = {}
        self.made: list[list[tuple[int, ...]]] = []
        self.opened: list[list[Event]] = []
        self.ticks: list[list[int]] = [[] for _ in range(layout.world_size)]
        self._names: dict[int, str] = {}
        self._kept = []  # groups, whose addresses are their names here
        self._sends, self._receives = defaultdict(deque), defaultdict(deque)
        self._arrived = defaultdict(list)
        self._met = Counter()
        self.runs: list[RankRun] = []
        self.meshes = [self._join(rank, monkeypatch) for rank in range(layout.world_size)]
        for name in (
            "get_backend",
            "get_global_rank",
            "isend",
            "irecv",
            "all_to_all_single",
            "all_gather_into_tensor",
        ):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def device_of(self, rank):
        """Where its messages lie."""
        return torch.device("cpu")

    def _join(self, rank, monkeypatch):
        """The mesh as ``rank`` makes it, in a world that has no other ranks."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        made, new_group = [], dist.new_group
        self.made.append(made)
        with monkeypatch.context() as patch:
            patch.setattr(
                dist,
                "new_group",
                lambda ranks, **kwargs: made.append(tuple(ranks)) or new_group(ranks, **kwargs),
            )
            self._trace_opening(rank, patch)
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.layout.world_size)
            try:
                wants_stop = lambda: getcurrent().wants_stop()  # noqa: E731
                how = {
                    "device": self.device_of(rank),
                    "via_cpu": self.via_cpu,
                    "wants_stop": wants_stop,
                    "tick": self.ticks[rank].append,
                    "speeds": self.speeds,
                }
                mesh = connect(self.layout, rank, **how)
                used = [
                    part
                    for ulysses, ring, world, *_ in mesh.sequence._by_width.values()
                    for part in (ulysses.group, ring._group, world.group)
                ]
                if mesh.link is not None:
                    used += [mesh.link._from_before, mesh.link._sends._group]
                for group in (dist.group.WORLD, *(group for group in used if group is not None)):
                    ranks = tuple(dist.get_process_group_ranks(group))
                    name = f"group {group.group_name} {ranks}"
                    self.members[name], self._names[id(group)] = ranks, name
                    self._kept.append(group)
            finally:
                dist.destroy_process_group()
        return mesh

    def _trace_opening(self, rank, patch):
        opened = []
        self.opened.append(opened)

        def note(operation, counts, group, **more):
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            opened.append(Event(rank, f"group of {ranks}", operation, counts, **more))
            return SimpleNamespace(wait=lambda: None)

        def meet(receiving, sending, receive_sizes, send_sizes, group, async_op=False):
            return note("all_to_all", (*send_sizes, *receive_sizes), group)

        def post(operation):
            return lambda tensor, peer, group=None: note(operation, (tensor.numel(),), group, peer=peer)

        patch.setattr(dist, "get_backend", lambda group=None: "fake")
        patch.setattr(dist, "all_to_all_single", meet)
        patch.setattr(dist, "isend", post("send"))
        patch.setattr(dist, "irecv", post("receive"))

    def name_of(self, group) -> str:
        return "all" if group is None else self._names[id(group)]

    def run(self, work: Callable, choose: Callable[[list], RankRun]) -> Traces:
        """``work(mesh, rank_run)`` on every rank; ``choose``: which of those that can go on does
        so. Raises Stuck.
        """
        self.runs = self.started(work)
        waits_for = {}
        ready = list(self.runs)
        while ready:
            run = choose(ready)
            waits_for[run] = run.switch()
            going = [run for run in self.runs if not run.dead]
            ready = [run for run in going if waits_for.get(run) is None or waits_for[run].done]
            if going and not ready:
                raise Stuck([str(event) for run in going for event in run.trace[-1:]])
        return [run.trace for run in self.runs]

    def started(self, work: Callable) -> list[RankRun]:
        return [RankRun(self, rank, work) for rank in range(self.layout.world_size)]

    # -- torch.distributed

    def get_backend(self, group):
        return self.backend

    def get_global_rank(self, group, index):
        return self.members[self.name_of(group)][index]

    def isend(self, tensor, to, group=None):
        return self._post(self._sends, "send", tensor, getcurrent().rank, to, group)

    def irecv(self, tensor, sender, group=None):
        return self._post(self._receives, "receive", tensor, sender, getcurrent().rank, group)

    def _post(self, queues, kind, tensor, source, target, group):
        run, name = getcurrent(), self.name_of(group)
        peer = target if kind == "send" else source
        operation = Operation(run.rank, run.note(kind, name, (tensor.numel(),), peer=peer), tensor)
        ends = (name, source, target)
        queues[ends].append(operation)
        while self._sends[ends] and self._receives[ends]:
            sent, received = self._sends[ends].popleft(), self._receives[ends].popleft()
            received.tensor.copy_(sent.tensor)
            sent.done = received.done = True
        return operation

    def all_to_all_single(self, receiving, sending, receive_sizes, send_sizes, group=None, async_op=False):
        run, name = getcurrent(), self.name_of(group)
        members = self.members[name]
        operation = Operation(run.rank, run.note("all_to_all", name, (*send_sizes, *receive_sizes)))
        number = self._met[name, run.rank]
        self._met[name, run.rank] += 1
        arrived = self._arrived[name, number]
        arrived.append((operation, receiving.split(receive_sizes), sending.split(send_sizes)))
        if len(arrived) == len(members):
            by_rank = {one.rank: (places, pieces) for one, places, pieces in arrived}
            for here, rank in enumerate(members):
                for there, other in enumerate(members):
                    by_rank[rank][0][there].copy_(by_rank[other][1][here])
            for one, _, _ in arrived:
                one.done = True
        if async_op:
            return operation
        while not operation.done:
            run.parent.switch(operation)
        return None

    def all_gather_into_tensor(self, whole, part, group, async_op):
        counts = [part.numel()] * (whole.numel() // part.numel())
        return self.all_to_all_single(whole, part.repeat(len(counts)), counts, counts, group, async_op)


def outputs_of(layout, compute: Callable, monkeypatch) -> dict:
    """Rank -> what ``compute(mesh)`` returned there; ranks take turns by chance."""
    outputs = {}

    def work(mesh, _run):
        outputs[mesh.rank] = compute(mesh)

    with torch.inference_mode():
        World(layout, "gloo", monkeypatch).run(work, Random(7).choice)
    return outputs


# -- the judge


def disagreements(traces: Traces, members: dict[str, tuple[int, ...]]) -> list[str]:
    """What the members of a group see otherwise: how many collectives, in which order, of how many
    elements; and messages that nobody receives.
    """
    found = []
    for name, ranks in members.items():
        seen = [
            [event for event in traces[rank] if event.group == name and event.operation == "all_to_all"]
            for rank in ranks
        ]
        if len({len(events) for events in seen}) > 1:
            found.append(f"{name}: {[len(events) for events in seen]} collectives")
        for number, events in enumerate(zip(*seen, strict=False)):
            sent = [event.counts[: len(ranks)] for event in events]
            received = [event.counts[len(ranks) :] for event in events]
            if [*zip(*sent, strict=True)] != received:
                found.append(f"{name}: collective {number} sends {sent} and receives {received}")
    messages = {"send": defaultdict(list), "receive": defaultdict(list)}
    for event in (event for trace in traces for event in trace if event.operation in messages):
        source, target = (event.rank, event.peer) if event.operation == "send" else (event.peer, event.rank)
        messages[event.operation][event.group, source, target].append(event.counts)
    for ends in messages["send"].keys() | messages["receive"].keys():
        sent, received = (messages[kind].get(ends, []) for kind in ("send", "receive"))
        if sent != received:
            found.append(f"{ends}: sent {sent}, received {received}")
    return found


def overall_order(traces: Traces, in_order: bool) -> list[str]:
    """One order of all events that every rank's own order is a part of: whatever the interleaving,
    the first of them that is not done can be. Raises CycleError where there is none.

    ``in_order``: as on a GPU, an operation begins when the one before it is done. Else it is done
    when it is waited for.
    """
    node_of: dict[tuple[int, int], str] = {}
    after: dict[str, set[str]] = defaultdict(set)
    met: Counter = Counter()
    ends: dict[tuple, list] = defaultdict(list)
    for rank, trace in enumerate(traces):
        for place, event in enumerate(trace):
            node_of[rank, place] = f"{place} of rank {rank}"
            if event.operation == "all_to_all":
                node_of[rank, place] = f"collective {met[event.group, rank]} of {event.group}"
                met[event.group, rank] += 1
            elif event.operation != "wait":
                source, target = (rank, event.peer) if event.operation == "send" else (event.peer, rank)
                ends[event.group, source, target, event.operation].append((rank, place))
    same = Merged()
    for (group, source, target, operation), sends in ends.items():
        if operation == "send":
            for send, receive in zip(sends, ends[group, source, target, "receive"], strict=True):
                if in_order:
                    same.merge(node_of[send], node_of[receive])
                else:
                    for waits, posted in ((send, receive), (receive, send)):
                        for place in waits_of(traces[waits[0]], waits[1]):
                            after[node_of[waits[0], place]].add(node_of[posted])
    for rank, trace in enumerate(traces):
        mine = [
            node_of[rank, place]
            for place, event in enumerate(trace)
            if not (in_order and event.operation == "wait")
        ]
        for one, following in pairwise(mine):
            after[following].add(one)
    merged = defaultdict(set)
    for node, before in after.items():
        merged[same.of(node)] |= {same.of(one) for one in before}
    return list(TopologicalSorter(merged).static_order())


def waits_of(trace: Sequence[Event], place: int) -> list[int]:
    return [at for at, event in enumerate(trace) if event.waits_for == place]


class Merged:
    """Nodes that are one."""

    def __init__(self):
        self._parent: dict[str, str] = {}

    def of(self, node: str) -> str:
        while node in self._parent:
            node = self._parent[node]
        return node

    def merge(self, one: str, other: str) -> None:
        one, other = self.of(one), self.of(other)
        if one != other:
            self._parent[one] = other


def has_an_order(traces: Traces, in_order: bool) -> bool:
    try:
        overall_order(traces, in_order)
    except CycleError:
        return False
    return True
