"""When a pool starts, each two ranks that will exchange messages try their connection."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent
from pipemesh.parallel_runtime.comm.connections import NUMBERS, compare, pattern, try_connections
from pipemesh.parallel_runtime.comm.exchange import Exchange
from pipemesh.parallel_runtime.errors import PoolFailed
from pipemesh.parallel_runtime.layout import Layout

from ..fixtures import running_clients
from ..kit.collectives import World, disagreements, has_an_order

# Which ranks exchange messages
CONNECTED = {
    Layout(ulysses=2, ring=2): [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)],
    Layout(ring=3): [(0, 1), (0, 2), (1, 2)],
    Layout(ulysses=2, cfg=2): [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)],
    Layout(pipefusion=3): [(0, 1), (1, 2)],
    Layout(ulysses=2, pipefusion=2): [(0, 1), (0, 2), (1, 3), (2, 3)],
}


def tried(world):
    """rank -> what a try there ended with; and the traces."""
    said = {}

    def work(mesh, _run):
        try:
            try_connections(mesh, ())
        except RuntimeError as error:
            said[mesh.rank] = str(error)

    return said, world.run(work, Random(7).choice)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("layout", CONNECTED, ids=Layout.equation)
def test_each_two_ranks_that_will_exchange_messages_try_their_connection_once(layout, backend, monkeypatch):
    world = World(layout, backend, monkeypatch)
    said, traces = tried(world)
    assert not said and disagreements(traces, world.members) == []
    assert has_an_order(traces, in_order=backend == "nccl")
    pairs = Counter()
    for event in (event for trace in traces for event in trace):
        if event.operation == "send":
            pairs[tuple(sorted((event.rank, event.peer)))] += 1
        elif event.operation == "all_to_all":
            ranks = world.members[event.group]
            pairs.update((event.rank, peer) for peer in ranks if peer > event.rank)
        assert {*event.counts} <= {NUMBERS}
    both_ways = 2 if backend == "gloo" else 1  # one collective
    assert pairs == {
        pair: both_ways if layout.sequence(pair[0]) == layout.sequence(pair[1]) or layout.cfg > 1 else 1
        for pair in CONNECTED[layout]
    }


def without(numbers, first):
    """What lies in the place of a message, (n,) zeros, of which only ``first`` numbers arrive."""
    return torch.cat((numbers[:first], torch.zeros_like(numbers[first:])))


FAULTS = {  # what arrives, and how many numbers of it are wrong
    "a bit": (lambda numbers: numbers ^ (torch.arange(NUMBERS, dtype=torch.int32) == 9), 1),
    "its beginning": (lambda numbers: without(numbers, NUMBERS // 2), NUMBERS // 2),
    "nothing": (lambda numbers: without(numbers, 0), NUMBERS),
    "another's": (lambda numbers: numbers + 1, NUMBERS),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("layout", "source", "target"),
    [(Layout(ulysses=2, ring=2), 1, 2), (Layout(ulysses=2, cfg=2), 3, 0), (Layout(pipefusion=3), 1, 2)],
    ids=str,
)
def test_a_connection_that_corrupts_is_named_with_both_ranks(layout, source, target, fault, monkeypatch):
    arrives, wrong = FAULTS[fault]
    world = World(layout, "gloo", monkeypatch)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")

    def sent(tensor, to, group=None):
        corrupts = (getcurrent().rank, to) == (source, target)
        return world.isend(arrives(tensor) if corrupts else tensor, to, group)

    monkeypatch.setattr(dist, "isend", sent)
    said, _ = tried(world)
    assert said == {
        target: f"Of {NUMBERS} numbers that rank {source} sent to rank {target} when the pool started, {wrong}"
        " arrived changed, so their connection corrupts data: test their machine's memory, or leave one of"
        " the two devices out of the pool."
    }


@pytest.mark.parametrize(
    ("backend", "machines", "remedy"),
    [
        ("gloo", (), "test their machine's memory"),
        ("gloo", (1, 1), "test their machine's memory"),
        (
            "gloo",
            (0, 1),
            "check the network between their machines, or name another interface in GLOO_SOCKET_IFNAME",
        ),
        ("nccl", (), "start ComfyUI with NCCL_P2P_DISABLE=1 in its environment"),
        ("nccl", (1, 1), "start node on their machine with NCCL_P2P_DISABLE=1 in its environment"),
        (
            "nccl",
            (1, 0),
            "check the network between their machines, or name another interface in NCCL_SOCKET_IFNAME",
        ),
    ],
)
def test_the_remedy_is_of_the_way_that_messages_took(backend, machines, remedy, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    with pytest.raises(RuntimeError, match=f"corrupts data: {remedy}, or leave one of the two devices out"):
        compare(pattern(0, 1, torch.device("cpu")) + 1, 0, 1, machines)


class NeverCame(torch.Tensor):
    """What NCCL gives at once; whatever reads it meets its failure."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("the cable is out")


def test_a_failure_that_shows_when_the_pattern_is_read_is_named_with_its_ranks(monkeypatch):
    world = World(Layout(ring=2), "nccl", monkeypatch)
    monkeypatch.setattr(Exchange, "swap", lambda self, sent: sent.as_subclass(NeverCame))
    said, _ = tried(world)
    assert said == dict.fromkeys(range(2), "The sequence of ranks 0, 1 could not connect: the cable is out")


def test_a_pool_whose_connection_corrupts_does_not_start(setup):
    argv = (
        sys.executable,
        str(Path(__file__).parents[1] / "kit" / "corrupting_worker.py"),
        "{fd}",
        "{parent}",
    )
    sentence = r"Of 262144 numbers that rank 0 sent to rank 1 when the pool started, 1 arrived changed"
    with (
        running_clients(replace(setup, argv=argv)) as clients,
        pytest.raises(PoolFailed, match=r"(?s)Rank 1 on cpu ended .* while joining.*" + sentence),
    ):
        clients(2).sessions.open(lambda: False)
