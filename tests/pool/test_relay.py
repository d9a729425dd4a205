"""A leader and its fake ranks on the loopback interface: what passes through, and what goes wrong,
by name.
"""

import gc
import os
import re
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
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
from pipemesh.parallel_runtime.wire.tcp import PARCEL, PIECE_BYTES, Hello, Link
from pipemesh.parallel_runtime.wire.tree import decode_tree
from pipemesh.pool.crew import Crew
from pipemesh.pool.devices import Device, place
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.leader import LentRanks
from pipemesh.pool.listener import accept
from pipemesh.pool.package import VERSION
from pipemesh.pool.pool import WorkerPool
from pipemesh.pool.remote_machine import join
from pipemesh.pool.rendezvous import (
    MachineMissing,
    store_key,
)

from ..kit.fake_pools import DEADLINE_S, call, fake_setup, forward, handled, submitted
from ..kit.fake_worker import CONTENT, OUTPUT
from ..wire.test_arena import largest_file
from ..wire.test_wire import descriptors

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def store():
    """As torchrun keeps one at its endpoint."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Far:
    """A leader named ``far`` in this process, with fake ranks."""

    def __init__(self, store, *rules, secret=SECRET, name="far", version=VERSION):
        self.setup = replace(
            fake_setup(*rules), rendezvous=f"127.0.0.1:{store.port}", secret=SECRET, lost_s=2.0
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        store.set(store_key(name), "{}:{}".format(*self._listener.getsockname()))
        leader = threading.Thread(
            target=accept,
            args=(self._listener, Hello(version=version, machine=name), replace(self.setup, secret=secret)),
            daemon=True,
        )
        leader.start()

    def close(self):
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()


@pytest.fixture
def leader(store):
    leaders = []

    def start(*rules, **options) -> Far:
        leaders.append(Far(store, *rules, **options))
        return leaders[-1]

    yield start
    for far in leaders:
        far.close()


def spread(devices="cpu,far/cpu,far/cpu"):
    return place(Layout(ulysses=devices.count(",") + 1), devices, "gloo", ())


@contextmanager
def running(far, placement=None):
    pool = WorkerPool(placement or spread(), far.setup)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


def far_pids():
    """Fake ranks are children of this process on either side."""
    return [
        child.pid for child in psutil.Process().children() if "fake_worker.py" in " ".join(child.cmdline())
    ]


# -- what passes through


def test_ranks_on_another_machine_answer_as_those_here_do(leader):
    with running(leader()) as pool:
        assert [reply.output for reply in call(pool, "Load")] == [b"Start Load"] * 3
        assert handled(pool, "Forward") == ["Start Load Forward"] * 3
        assert [pid > 0 for pid in pool.ranks.pids] == [True, False, False]
        assert pool.ranks.has_lost_one(pool.idle) is False
        assert len(far_pids()) == 3
    assert far_pids() == []  # the connection ends after they have


def test_a_far_ranks_phase_is_seen_on_the_board(leader):
    """At once what it was asked, and its own count within a second."""
    with running(leader("1:Load=hang", "2:Load=gated")) as pool, pytest.raises(RunCancelled):
        board = pool.arena.board
        call(
            pool,
            "Load",
            lambda: board.phase(1) == board.phase(2) == "loading" and board.progress(2) % (1 << 32) > 0,
        )


def ends():
    one, other = socket.socketpair()
    return Link(one, FromMachine), Link(other, ToMachine)


LOAD = ForRanks((1, 2), Load(request=1, model="m", source=b"tree"))
ANSWER = Said(1, {"type": "Done", "request": 1, "memory": (1, 2, 3)})  # as another version may say it


def test_what_a_descriptor_holds_arrives_as_a_segment_of_its_own():
    ours, theirs = ends()
    tensors = [torch.arange(1 << 19), torch.ones(3)]
    parcel = Parcel(tensors)
    segment = parcel.segment
    sender = threading.Thread(target=ours.send, args=(LOAD, [segment.fd]))
    sender.start()
    message, (fd,) = theirs.receive()
    sender.join()
    assert message == LOAD
    assert os.fstat(fd).st_size == segment.nbytes
    got = type(segment)(fd, segment.nbytes)
    arrived = decode_tree(parcel.tree, got.tensor)
    assert all(torch.equal(one, tensor) for one, tensor in zip(arrived, tensors, strict=True))
    release = ForRanks((1,), Release(request=2, model="m"))
    ours.send(release)
    assert theirs.receive() == (release, [])
    for end in (ours, theirs, got, segment):
        end.close()


def test_parcels_that_came_are_given_back_when_the_next_is_cut_off(parcels):
    ours, theirs = ends()
    body = msgspec.msgpack.encode(LOAD)
    ours._sock.sendall(HEADER.pack(len(body), 2) + body + PARCEL.pack(3) + b"one" + PARCEL.pack(3) + b"t")
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive()
    assert not parcels()
    theirs.close()


@pytest.fixture
def parcels():
    """Returns the descriptors of parcels that came since, whatever other tests' doubles hold."""

    def held():
        gc.collect()  # frames of errors that are over
        return {*descriptors(OUTPUT), *descriptors("pipemesh-parcel")}

    before = held()
    return lambda: held() - before


@pytest.mark.parametrize("devices", ["cpu,cpu,cpu", "cpu,far/cpu,far/cpu"], ids=["here", "far"])
def test_an_output_apart_is_there_until_nobody_has_it_and_leaves_nothing_where_nobody_takes_it(
    leader, devices, parcels
):
    """This process is the leader's too."""
    with running(leader(), spread(devices)) as pool:
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
    ours, theirs = ends()
    theirs.send(msgspec.structs.replace(ANSWER, message={**ANSWER.message, "apart": True}))
    with pytest.raises(msgspec.ValidationError, match="no descriptor came with it"):
        ours.receive()
    for end in (ours, theirs):
        end.close()


def evaluation(arena_bytes: int, number: int = 5) -> ForRanks:
    return ForRanks((1, 2), forward(number, "m"), arena_bytes=arena_bytes)


def test_the_far_arena_grows_with_the_evaluation_that_needs_it():
    ours, theirs = ends()
    arena = Segment.create("arena", 4096, ROOM)
    lent = LentRanks(theirs, "127.0.0.1", fake_setup())
    crew = Crew(spread(), "far", fake_setup())
    lent._request(crew, arena, evaluation(1 << 20), [])
    end_run = EndRun(request=6, model="m", arena_bytes=64 << 10)
    lent._request(crew, arena, ForRanks((1, 2), end_run), [])
    assert arena.nbytes == os.fstat(arena.fd).st_size == 64 << 10, "and shrinks with the run's end"
    lent._request(crew, arena, evaluation(1 << 20), [])
    assert arena.nbytes == 1 << 20
    with largest_file(1 << 20):
        lent._request(crew, arena, evaluation(2 << 20, 6), [])
    with lent._speaking():
        said = [ours.receive()[0] for _ in crew.ranks]
    assert [answer.rank for answer in said] == [1, 2]
    assert all(answer.message.text.startswith("Shared memory is full: ") for answer in said)
    assert lent._owing == {1: 5, 2: 5}, "it beats as long as a ComfyUI waits for something"
    for end in (ours, theirs, arena):
        end.close()


def test_a_far_machine_without_room_for_a_model_says_so_and_reads_on(leader):
    with running(leader(), spread("cpu,far/cpu")) as pool:
        segment = Segment.create("model", 2 << 20)
        with (
            largest_file(1 << 20),
            pytest.raises(
                ModelError, match=r"^Rank 1 on far/cpu failed while receiving: Shared memory is full: "
            ),
        ):
            pool.ask(Load(request=pool.next_request(), model="m", source=b""), [segment.fd])
        assert handled(pool) == ["Start Load Release", "Start Release"]
        segment.close()


def test_a_session_that_fails_in_a_way_nobody_foresaw_closes_its_connection(monkeypatch):
    ours, theirs = ends()
    monkeypatch.setattr(LentRanks, "_serve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LentRanks(theirs, "127.0.0.1", fake_setup()).run()
    ours._sock.settimeout(DEADLINE_S)
    with pytest.raises(ChannelClosed, match=r"^it closed the connection$"):
        ours.receive()
    ours.close()


def test_another_secret_is_refused_and_nothing_is_started(leader):
    far = leader(secret="another secret, quite as long")
    pool = WorkerPool(spread(), far.setup)
    with pytest.raises(
        PoolFailed,
        match=(
            r"^Machine far at 127\.0\.0\.1:\d+ refused the exchange of secrets .*: set the same"
            r" PIPEMESH_SECRET"
        ),
    ):
        pool.start()
    assert (pool.state, far_pids()) == ("failed", [])


def test_another_version_is_named_with_both_machines_and_nothing_is_started(leader):
    """Before anything is said whose form may differ between them."""
    pool = WorkerPool(spread(), leader(version="9.0.0").setup)
    near = re.escape(f"ComfyUI's machine {socket.gethostname()} has PipeMesh {VERSION}")
    with pytest.raises(
        PoolFailed,
        match=(
            rf"^Machine far has PipeMesh 9\.0\.0 and {near}: install the same version of PipeMesh on both\.$"
        ),
    ):
        pool.start()
    assert (pool.state, far_pids()) == ("failed", [])


def test_a_message_that_a_leader_does_not_know_is_told_with_the_next_move(leader):
    """As between two states of a checkout that both call themselves by the same version."""
    far = leader()
    machine = join("far", (1, 2), far.setup, Arena())
    body = msgspec.msgpack.encode({"type": "Opening", "pool": 1})
    machine.link._sock.sendall(HEADER.pack(len(body), 0) + body)
    with pytest.raises(
        MachineMissing,
        match=(
            rf"^Machine far cannot start its ranks: Its PipeMesh {VERSION} was sent a message that it does not know"
            r" \(.*\): install the same"
        ),
    ):
        machine.pump()
    machine.link.close()


# -- what goes wrong, by name


def test_a_pool_node_says_when_it_is_queued_that_machines_cannot_be_reached():
    from pipemesh.nodes.runtime import Runtime

    sentence = Runtime(fake_setup()).check(devices="cpu,far/cpu", layout="by hand", ulysses=2)
    assert sentence.startswith("Machine far is met at torchrun's rendezvous, and PIPEMESH_RDZV is not set: ")
    reachable = replace(fake_setup(), rendezvous="10.0.0.1:29400", secret=SECRET)
    assert Runtime(reachable).check(devices="cpu,far/cpu", layout="by hand", ulysses=2) is True
    assert Runtime(fake_setup()).check(devices="cpu", layout="by hand", ulysses=2) is True


def test_a_pool_node_tells_what_an_order_of_devices_costs_and_its_groups_stay_apart():
    from pipemesh.lab.commands.parity import stock_model
    from pipemesh.nodes.runtime import Runtime

    runtime = Runtime(replace(fake_setup(), rendezvous="10.0.0.1:29400", secret=SECRET))
    values = {"layout": "by hand", "ulysses": 2, "cfg": 2}
    told = []
    for devices in ("cpu,far/cpu,cpu,far/cpu", "cpu,cpu,far/cpu,far/cpu", "far/cpu,far/cpu,far/cpu,far/cpu"):
        choice = runtime.choose(devices=devices, **values)
        told.append(len(runtime.notices.latest()))
        joins = runtime.parallelize(stock_model(2), choice).remote.sampling._can_join
        assert joins is (devices.count("far") == 4), "a sequence over the network is slower than its part"
    assert told == [1, 1, 1]
    assert runtime.notices.latest()[0].text.startswith("As devices are listed, 2 groups of ulysses send over")


def test_a_machine_that_has_not_joined_is_told_the_command(leader):
    far = leader()
    with pytest.raises(
        MachineMissing,
        match=(
            r"^Machine other has not joined .*: run there, in the checkout: TORCH\S+ torchrun .* -m launcher"
            r" node --name other$"
        ),
    ):
        join("other", (1,), far.setup, Arena())


def test_a_machine_that_has_left_is_told_the_command(leader):
    far = leader(name="left")
    far.close()
    with pytest.raises(MachineMissing, match=r"^Machine left does not answer at 127.* --name left$"):
        join("left", (1,), far.setup, Arena())


def test_a_leader_beats_before_its_ranks_have_started(monkeypatch):
    """Else one that is stopped then would not be missed."""
    monkeypatch.setattr("pipemesh.pool.leader.BEAT_S", 0.01)
    ours, theirs = ends()
    leader = threading.Thread(target=LentRanks(theirs, "127.0.0.1", fake_setup()).run, daemon=True)
    leader.start()
    assert select.select([ours], [], [], DEADLINE_S)[0]
    assert ours.receive()[0] == Beat({})
    ours.close()
    leader.join(DEADLINE_S)


def test_a_machine_that_is_stopped_is_not_suspected_of_another_secret(store):
    """Its kernel takes connections for it."""
    setup = replace(fake_setup(), rendezvous=f"127.0.0.1:{store.port}", secret=SECRET, lost_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        store.set(store_key("deaf"), "{}:{}".format(*deaf.getsockname()))
        with pytest.raises(
            MachineMissing, match=r"^Machine deaf does not answer at \S+ \(timed out\): check"
        ):
            join("deaf", (1,), setup, Arena())


def test_a_rendezvous_that_is_not_there_is_named():
    setup = replace(fake_setup(), rendezvous="127.0.0.1:9", secret=SECRET, lost_s=0.5)
    with pytest.raises(
        MachineMissing,
        match=(
            r"^Nothing answers at the rendezvous 127\.0\.0\.1:9 .*: run on every machine, in the checkout: .*"
            r" -m launcher node$"
        ),
    ):
        join("far", (1,), setup, Arena())


def test_what_another_machine_has_not_is_named_in_comfyui(leader):
    placement = place(Layout(ulysses=2), "cuda:0,far/cuda:99", "nccl", (Device("cuda:0", "GPU-none"),))
    pool = WorkerPool(placement, leader().setup)
    with pytest.raises(
        PoolFailed, match=r"^Machine far cannot start its ranks: It has no cuda:99: choose from cpu"
    ):
        pool.start()
    assert (pool.state, far_pids()) == ("failed", [])


def test_a_far_rank_that_dies_is_named_with_its_last_lines(leader):
    with running(leader("2:Load=die")) as pool:
        with pytest.raises(
            PoolFailed,
            match=r"^Rank 2 on far/cpu ended with exit status 3 while loading: .*\nLast lines of rank 2:",
        ) as caught:
            call(pool, "Load")
        assert "the last thing I saw" in str(caught.value)


def test_machines_that_do_not_reach_each_other_are_told_what_to_open(leader):
    far = leader("1:Start=joining-hang")
    pool = WorkerPool(spread("cpu,far/cpu"), replace(far.setup, stall_s=2.0))
    with pytest.raises(
        PoolFailed,
        match=r"^Rank 1 on far/cpu made no progress for 2 s while joining: with several machines, see",
    ):
        pool.start()


def test_a_leader_that_ends_in_mid_run_is_named(leader):
    with running(leader("1:Load=hang")) as pool:

        def lose() -> bool:
            if pool.state == "busy":
                pool.ranks._machines[0].link._sock.shutdown(socket.SHUT_RDWR)
            return False

        with pytest.raises(
            PoolFailed,
            match=(
                r"^Machine far was lost while loading \(rank 1 on far/cpu, rank 2 on far/cpu; it closed the"
                r" connection\): check"
            ),
        ):
            call(pool, "Load", lose)


def test_a_leader_that_falls_silent_while_its_ranks_compute_is_lost(leader, monkeypatch):
    monkeypatch.setattr("pipemesh.pool.leader.BEAT_S", DEADLINE_S)
    monkeypatch.setattr("pipemesh.parallel_runtime.wire.tcp.BEAT_S", 0.1)
    with running(leader("1:Load=hang")) as pool:
        pool.ranks._machines[0].link._lost_ms = 100
        with pytest.raises(
            PoolFailed,
            match=(
                r"^Machine far was lost while loading \(rank 1 on far/cpu, rank 2 on far/cpu; nothing came for"
                r" 0\.4 s\)"
            ),
        ):
            call(pool, "Load")


def test_a_machine_lost_between_runs_costs_no_run(leader):
    handle = PoolHandle(spread("cpu,far/cpu"), leader().setup)
    first = handle.ensure()
    assert handle.live() is first
    first.ranks._machines[0].link._sock.shutdown(socket.SHUT_RDWR)
    assert handle.live() is None
    assert handled(handle.ensure()) == ["Start Release"] * 2
    handle.close()


def test_ranks_of_a_group_on_another_machine_are_called_back_there_and_others_hear_nothing(leader):
    with running(leader("*:Forward=cancellable")) as pool:
        number = submitted(pool, group=(2,))
        with pytest.raises(RunCancelled):
            pool.collect(number, lambda: pool.state == "busy")
        assert handled(pool) == ["Start Release", "Start Release", "Start Forward Release"]


def test_a_pool_may_have_no_rank_on_comfyuis_machine(leader):
    with running(leader(), spread("far/cpu,far/cpu")) as pool:
        assert handled(pool) == ["Start Release"] * 2
        assert pool.ranks.pids == [] and len(far_pids()) == 2
    assert far_pids() == []


def test_cancel_while_far_ranks_load_is_collected_later(leader):
    with running(leader("1:Load=slow")) as pool:
        with pytest.raises(RunCancelled):
            call(pool, "Load", lambda: pool.state == "busy")
        assert pool.ranks.has_lost_one(pool.idle) is False  # what it will still say is no loss
        assert handled(pool) == ["Start Load Release"] * 3


def test_cancel_while_tensors_are_on_their_way_ends_the_pool_and_the_next_run_has_a_fresh_one(leader):
    handle = PoolHandle(spread("cpu,far/cpu"), leader().setup)
    first = handle.ensure()
    segment = Segment.create("parcel", 3 * PIECE_BYTES)
    asked = []
    with pytest.raises(RunCancelled, match=r"^The run was cancelled\.$"):
        first.ask(
            Load(request=1, model="m", source=b""),
            [segment.fd],
            lambda: asked.append(first.state) or asked.count("busy") == 3,
        )
    assert (first.state, first.ranks._machines[0].link.fileno()) == ("closed", -1)
    assert handled(handle.ensure()) == ["Start Release"] * 2
    handle.close()
    segment.close()


def test_a_pool_that_is_opened_twice_is_refused():
    again = Open(
        machine="", degrees={}, devices=(), backend="gloo", meeting="", comfy_args=b"", arena_bytes=0
    )
    ranks = SimpleNamespace(_link=SimpleNamespace(pump=lambda: [(again, [])]))
    with pytest.raises(LayoutError, match="opened twice"):
        LentRanks._pass_on(ranks, None, None, None)
