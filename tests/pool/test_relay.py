"""A leader and its fake ranks on the loopback interface: what passes through, and what goes wrong,
by name. What a pool here and one over machines have in common is with the pool's tests.
"""

import gc
import os
import re
import select
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from pipemesh.lab.commands.parity import stock_model
from pipemesh.nodes.runtime import Runtime
from pipemesh.parallel_runtime.errors import LayoutError, ModelError, PoolFailed, RunCancelled
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.wire.arena import ROOM, Arena
from pipemesh.parallel_runtime.wire.channel import HEADER, ChannelClosed
from pipemesh.parallel_runtime.wire.messages import (
    Beat,
    EndRun,
    ForRanks,
    FromMachine,
    Load,
    Open,
    Release,
    Said,
    ToMachine,
)
from pipemesh.parallel_runtime.wire.parcel import Parcel
from pipemesh.parallel_runtime.wire.segment import Segment, TensorRef, segment_over
from pipemesh.parallel_runtime.wire.tcp import PARCEL, PIECE_BYTES, Link
from pipemesh.parallel_runtime.wire.tree import decode_tree
from pipemesh.pool.crew import Crew
from pipemesh.pool.devices import Device, place
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.leader import LentRanks
from pipemesh.pool.package import VERSION
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.remote_machine import join
from pipemesh.pool.rendezvous import MachineMissing, store_key

from ..kit.fake_pools import (
    DEADLINE_S,
    SECRET,
    call,
    fake_setup,
    forward,
    handled,
    near_and_far,
    spread,
    submitted,
)
from ..kit.fake_worker import CONTENT, OUTPUT
from ..wire.test_arena import largest_file
from ..wire.test_wire import descriptors

THREE = "cpu,far/cpu,far/cpu"
LOAD = ForRanks((1, 2), Load(request=1, model="m", source=b"tree"))
ANSWER = Said(1, {"type": "Done", "request": 1, "memory": (1, 2, 3)})  # as another version may say it


@contextmanager
def two_ends():
    """Links of ComfyUI and of a leader to each other."""
    one, other = socket.socketpair()
    with closing(Link(one, FromMachine)) as ours, closing(Link(other, ToMachine)) as theirs:
        yield ours, theirs


def far_pids():
    """Fake ranks are children of this process on either side."""
    children = psutil.Process().children()
    return [child.pid for child in children if "fake_worker.py" in " ".join(child.cmdline())]


# -- what passes through


@pytest.mark.parametrize("devices", [THREE, "far/cpu,far/cpu"])
def test_ranks_on_another_machine_answer_as_those_here_do(started, devices):
    """ComfyUI's may have none."""
    pool, ranks = started(devices), 1 + devices.count(",")
    assert [reply.output for reply in call(pool, "Load")] == [b"Start Load"] * ranks
    assert handled(pool, "Forward") == ["Start Load Forward"] * ranks
    assert [bool(pid) for pid in pool.ranks.pids] == [True, False, False] * (devices == THREE)
    assert pool.ranks.has_lost_one(pool.idle) is False
    assert len(far_pids()) == ranks
    pool.close()
    assert far_pids() == []  # the connection ends after they have


def test_a_far_ranks_phase_is_seen_on_the_board(started):
    """At once what it was asked, and its own count within a second."""
    pool = started(THREE, "1:Load=hang", "2:Load=gated")
    phase, progress = pool.arena.board.phase, pool.arena.board.progress
    with pytest.raises(RunCancelled):
        call(pool, "Load", lambda: phase(1) == phase(2) == "loading" and progress(2) % (1 << 32) > 0)


def test_what_a_descriptor_holds_arrives_as_a_segment_of_its_own():
    tensors = [torch.arange(1 << 19), torch.ones(3)]
    parcel = Parcel(tensors)
    with two_ends() as (ours, theirs), closing(parcel.segment) as segment:
        sender = threading.Thread(target=ours.send, args=(LOAD, [segment.fd]))
        sender.start()
        message, (fd,) = theirs.receive()
        sender.join()
        assert (message, os.fstat(fd).st_size) == (LOAD, segment.nbytes)
        with closing(type(segment)(fd, segment.nbytes)) as got:
            assert all(map(torch.equal, decode_tree(parcel.tree, got.tensor), tensors))
        release = ForRanks((1,), Release(request=2, model="m"))
        ours.send(release)
        assert theirs.receive() == (release, [])


@pytest.fixture
def parcels():
    """Returns the descriptors of parcels that came since, whatever other tests' doubles hold."""

    def held():
        gc.collect()  # frames of errors that are over
        return {*descriptors(OUTPUT), *descriptors("pipemesh-parcel")}

    before = held()
    return lambda: held() - before


def test_parcels_that_came_are_given_back_when_the_next_is_cut_off(parcels):
    body = msgspec.msgpack.encode(LOAD)
    with two_ends() as (ours, theirs):
        ours._sock.sendall(HEADER.pack(len(body), 2) + body + PARCEL.pack(3) + b"one" + PARCEL.pack(3) + b"t")
        ours.close()
        with pytest.raises(ChannelClosed):
            theirs.receive()
        assert not parcels()


@near_and_far
def test_an_output_apart_is_there_until_nobody_has_it_and_leaves_nothing_where_nobody_takes_it(
    started, devices, parcels
):
    """This process is the leader's too."""
    pool = started(devices)
    answer = pool.collect(submitted(pool, group=(1,), rules="1:Forward=apart"))[1]
    segment = segment_over(answer.apart.fd)
    assert parcels()
    del answer
    until = time.monotonic() + DEADLINE_S  # a leader lets go of it when it has sent it
    while parcels() and time.monotonic() < until:
        os.sched_yield()
    assert not parcels()
    assert bytes(segment.tensor(TensorRef(0, (len(CONTENT),), "uint8"))) == CONTENT
    for rules in (
        "1:Forward=apart-twice",  # the second is owed by none
        "1:Forward=apart 2:Forward=error",
        "1:Forward=apart 2:Forward=apart 0:Forward=cancellable",  # abandoned
    ):
        number = submitted(pool, rules=rules)
        if "cancellable" not in rules:
            with suppress(ModelError):
                pool.collect(number)
        pool.abandon()
        call(pool, "Release")
        assert not parcels(), rules
    if "far" not in devices:  # a leader ends in its own time
        with suppress(PoolFailed):
            pool.collect(submitted(pool, rules="1:Forward=apart 2:Forward=apart-and-strange"))
        assert not parcels()


def test_an_answer_that_claims_memory_and_brings_none_is_unknown_here():
    with two_ends() as (ours, theirs):
        theirs.send(msgspec.structs.replace(ANSWER, message={**ANSWER.message, "apart": True}))
        with pytest.raises(msgspec.ValidationError, match="no descriptor came with it"):
            ours.receive()


def test_the_far_arena_grows_with_the_evaluation_that_needs_it():
    crew = Crew(spread(THREE), "far", fake_setup())
    with two_ends() as (ours, theirs), closing(Segment.create("arena", 4096, ROOM)) as arena:
        lent = LentRanks(theirs, "127.0.0.1", fake_setup())

        def nbytes_after(request, arena_bytes=0):
            lent._request(crew, arena, ForRanks((1, 2), request, arena_bytes=arena_bytes), [])
            return arena.nbytes

        assert nbytes_after(forward(5, "m"), 1 << 20) == 1 << 20
        end_of_run = EndRun(request=6, model="m", arena_bytes=64 << 10)
        assert nbytes_after(end_of_run) == os.fstat(arena.fd).st_size == 64 << 10, "and shrinks with its end"
        assert nbytes_after(forward(5, "m"), 1 << 20) == 1 << 20
        with largest_file(1 << 20):
            nbytes_after(forward(6, "m"), 2 << 20)
        with lent._speaking():
            said = [ours.receive()[0] for _ in crew.ranks]
        assert [answer.rank for answer in said] == [1, 2]
        assert all(answer.message.text.startswith("Shared memory is full: ") for answer in said)
        assert lent._owing == {1: 5, 2: 5}, "it beats as long as a ComfyUI waits for something"


def test_a_session_that_fails_in_a_way_nobody_foresaw_closes_its_connection(monkeypatch):
    monkeypatch.setattr(LentRanks, "_serve", lambda *_: 1 / 0)
    with two_ends() as (ours, theirs):
        with pytest.raises(ZeroDivisionError):
            LentRanks(theirs, "127.0.0.1", fake_setup()).run()
        ours._sock.settimeout(DEADLINE_S)
        with pytest.raises(ChannelClosed, match=r"^it closed the connection$"):
            ours.receive()


# -- what goes wrong, by name


ONE_FAR = place(Layout(ulysses=2), "cuda:0,far/cuda:99", "nccl", (Device("cuda:0", "GPU-none"),))
NEAR = re.escape(f"ComfyUI's machine {socket.gethostname()} has PipeMesh {VERSION}")
NOT_STARTED = {
    "secret": (
        spread(THREE),
        {"secret": "another secret, quite as long"},
        r"at 127\.0\.0\.1:\d+ refused the exchange of secrets .*: set the same PIPEMESH_SECRET",
    ),
    "version": (  # before anything is said whose form may differ between them
        spread(THREE),
        {"version": "9.0.0"},
        rf"has PipeMesh 9\.0\.0 and {NEAR}: install the same version of PipeMesh on both\.$",
    ),
    "devices": (ONE_FAR, {}, r"cannot start its ranks: It has no cuda:99: choose from cpu"),
}


@pytest.mark.parametrize("what", NOT_STARTED)
def test_a_machine_that_has_others_than_comfyui_is_told_so_and_starts_nothing(started, what):
    placement, options, sentence = NOT_STARTED[what]
    pool = WorkerPool(placement, started.leader(**options).setup)
    with pytest.raises(PoolFailed, match=rf"^Machine far {sentence}"):
        pool.start()
    assert (pool.state, far_pids()) == ("failed", [])


def test_a_message_that_a_leader_does_not_know_is_told_with_the_next_move(started):
    """As between two states of a checkout that both call themselves by the same version."""
    machine = join("far", (1, 2), started.leader().setup, Arena())
    body = msgspec.msgpack.encode({"type": "Opening", "pool": 1})
    machine.link._sock.sendall(HEADER.pack(len(body), 0) + body)
    sentence = (
        rf"^Machine far cannot start its ranks: Its PipeMesh {VERSION} was sent a message that it does not"
        r" know \(.*\): install the same"
    )
    with closing(machine.link), pytest.raises(MachineMissing, match=sentence):
        machine.pump()


OVER_MACHINES = replace(fake_setup(), rendezvous="10.0.0.1:29400", secret=SECRET)


def test_a_pool_node_says_when_it_is_queued_that_machines_cannot_be_reached():
    def said(setup, devices):
        return Runtime(setup).check(devices=devices, layout="by hand", ulysses=2)

    sentence = "Machine far is met at torchrun's rendezvous, and PIPEMESH_RDZV is not set: "
    assert said(fake_setup(), "cpu,far/cpu").startswith(sentence)
    assert said(OVER_MACHINES, "cpu,far/cpu") is said(fake_setup(), "cpu") is True


def test_a_pool_node_tells_what_an_order_of_devices_costs_and_its_groups_stay_apart():
    runtime = Runtime(OVER_MACHINES)
    for devices in ("cpu,far/cpu,cpu,far/cpu", "cpu,cpu,far/cpu,far/cpu", "far/cpu,far/cpu,far/cpu,far/cpu"):
        choice = runtime.choose(devices=devices, layout="by hand", ulysses=2, cfg=2)
        (told,) = runtime.notices.latest()
        assert told.text.startswith("As devices are listed, 2 groups of ulysses send over")
        joins = runtime.parallelize(stock_model(2), choice).remote.sampling._can_join
        assert joins is (devices.count("far") == 4), "a sequence over the network is slower than its part"


def closed(leader):
    leader.close()
    return leader.setup


def deaf(leader):
    """Stopped: its kernel takes connections for it."""
    leader.deaf = socket.create_server(("127.0.0.1", 0))
    leader.store.set(store_key("far"), "{}:{}".format(*leader.deaf.getsockname()))
    return replace(leader.setup, lost_s=0.2)


MISSING = {  # how -> the setup of who looks for it, and what it is told
    "has not joined": (
        lambda leader: leader.store.delete_key(store_key("far")) and leader.setup,
        r"Machine far has not joined .*: run there, in the checkout: TORCH\S+ torchrun .* -m launcher node"
        r" --name far$",
    ),
    "has left": (closed, r"Machine far does not answer at 127.* --name far$"),
    "is stopped": (deaf, r"Machine far does not answer at \S+ \(timed out\): check"),
    "no rendezvous": (
        lambda leader: replace(leader.setup, rendezvous="127.0.0.1:9", lost_s=0.5),
        r"Nothing answers at the rendezvous 127\.0\.0\.1:9 .*: run on every machine, in the checkout: .* -m"
        r" launcher node$",
    ),
}


@pytest.mark.parametrize("how", MISSING)
def test_a_machine_that_is_not_there_is_told_the_next_move(started, how):
    as_seen, sentence = MISSING[how]
    leader = started.leader()
    setup = as_seen(leader)
    with pytest.raises(MachineMissing, match=f"^{sentence}"):
        join("far", (1,), setup, Arena())
    if how == "is stopped":
        leader.deaf.close()


def test_a_leader_beats_before_its_ranks_have_started(monkeypatch):
    """Else one that is stopped then would not be missed."""
    monkeypatch.setattr("pipemesh.pool.leader.BEAT_S", 0.01)
    with two_ends() as (ours, theirs):
        leader = threading.Thread(target=LentRanks(theirs, "127.0.0.1", fake_setup()).run, daemon=True)
        leader.start()
        assert select.select([ours], [], [], DEADLINE_S)[0]
        assert ours.receive()[0] == Beat({})
        ours.close()
        leader.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("rule", "phase", "ends", "why"),
    [
        ("1:Load=hang", "loading", True, "it closed the connection"),
        ("1:Load=hang", "loading", False, r"nothing came for 0\.4 s"),
        ("1:Start=joining-hang", "joining", False, r"nothing came for 0\.4 s"),
    ],
)
def test_a_leader_that_ends_or_falls_silent_while_its_ranks_are_at_work_is_lost(
    started, monkeypatch, rule, phase, ends, why
):
    monkeypatch.setattr("pipemesh.parallel_runtime.wire.tcp.BEAT_S", 0.1)
    pool = started.made(THREE, rule)
    board, far = pool.arena.board, []

    def lose() -> bool:
        if board.phase(1) == phase and not far:
            far.extend(map(psutil.Process, {*far_pids()} - {*pool.ranks.pids}))
            link = pool.ranks._machines[0].link
            monkeypatch.setattr("pipemesh.pool.leader.BEAT_S", DEADLINE_S)
            link._lost_ms = 100
            if ends:
                link._sock.shutdown(socket.SHUT_RDWR)
        return False

    ranks = "rank 1 on far/cpu, rank 2 on far/cpu"
    with pytest.raises(PoolFailed, match=rf"^Machine far was lost while {phase} \({ranks}; {why}\): check"):
        pool.start(lose)
        call(pool, "Load", lose)
    for rank in far if ends else ():
        rank.wait(DEADLINE_S)


@pytest.fixture
def over_two(started):
    made = PoolHandle(spread("cpu,far/cpu"), started.leader().setup)
    yield made
    made.close()


def test_a_machine_lost_between_runs_costs_no_run_and_ends_its_ranks_of_a_comfyui_that_is_gone(over_two):
    first = over_two.ensure()
    (far_rank,) = map(psutil.Process, {*far_pids()} - {*first.ranks.pids})
    assert over_two.live() is first
    first.ranks._machines[0].link._sock.shutdown(socket.SHUT_RDWR)
    assert over_two.live() is None
    assert handled(over_two.ensure()) == ["Start Release"] * 2
    far_rank.wait(DEADLINE_S)


def test_cancel_while_tensors_are_on_their_way_ends_the_pool_and_the_next_run_has_a_fresh_one(over_two):
    first, asked = over_two.ensure(), []
    request = Load(request=1, model="m", source=b"")

    def cancelled():
        asked.append(first.state)
        return asked.count("busy") == 3

    with (
        closing(Segment.create("parcel", 3 * PIECE_BYTES)) as segment,
        pytest.raises(RunCancelled, match=r"^The run was cancelled\.$"),
    ):
        first.ask(request, [segment.fd], cancelled)
    assert (first.state, first.ranks._machines[0].link.fileno()) == ("closed", -1)
    assert handled(over_two.ensure()) == ["Start Release"] * 2


def test_a_pool_that_is_opened_twice_is_refused():
    given = {"degrees": {}, "devices": (), "backend": "gloo", "meeting": "", "comfy_args": b""}
    again = Open(machine="", arena_bytes=0, **given)
    ranks = SimpleNamespace(_link=SimpleNamespace(pump=lambda: [(again, [])]))
    with pytest.raises(LayoutError, match="opened twice"):
        LentRanks._pass_on(ranks, None, None, None)
