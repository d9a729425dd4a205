"""How far a rank came in an evaluation's messages, as it tells when it has failed. The pool judges
by that whether its ranks can go on.
"""

from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.bench.forwards import StandinExchange, StandinRing
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.mesh import SequenceComm
from pipemesh.parallel_runtime.comm.parts import to_all
from pipemesh.parallel_runtime.comm.shard_gather import ShardGather
from pipemesh.parallel_runtime.comm.traffic import Traffic, Unlike, no_wish
from pipemesh.parallel_runtime.errors import ModelError
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.ring_attention import RingAttention
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import EndRun, Failed, Forward
from pipemesh.parallel_runtime.worker.arena_io import Written
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler, Skipped, Stand
from pipemesh.parallel_runtime.worker.rank_loop import RankLoop

CPU = torch.device("cpu")
HERE = (3, 77)


# -- a message that is left unfinished


def fail(*_, **__):
    raise ZeroDivisionError


def ring():
    made = StandinRing(0, 3)
    return made, made.walk(torch.ones(2, 1, 1, 3, 4), [3, 3, 3], no_wish)


def leave_a_walk_behind_its_first_hop(monkeypatch):
    made, walk = ring()
    blocks = iter(walk)
    next(blocks), next(blocks)
    del blocks  # its receive is posted, and what comes next would find the message
    return made.traffic


def fail_while_keys_and_values_are_gathered(monkeypatch):
    made, _ = ring()
    comm = SimpleNamespace(ring=made)
    with pytest.raises(ZeroDivisionError):
        RingAttention(comm, fail, None).gather(torch.ones(2, 1, 1, 3, 4), [3, 3, 3], no_wish)
    return made.traffic


def fail_in_an_exchange(monkeypatch):
    made = StandinExchange(0, 2)
    monkeypatch.setattr(made, "_exchange", fail)
    with pytest.raises(ZeroDivisionError):
        made.all_to_all([to_all(torch.ones(8), 2)], [torch.empty(2, 8)], no_wish)
    return made.traffic


def fail_in_a_question(monkeypatch):
    made = StandinExchange(0, 2)
    monkeypatch.setattr(made, "_exchange", fail)
    with pytest.raises(ZeroDivisionError):
        super(StandinExchange, made).largest(torch.ones(3))
    return made.traffic


def fail_in_a_gather(monkeypatch):
    made = ShardGather(None, 0, 2, via_cpu=False)
    monkeypatch.setattr(made, "_send", fail)
    with pytest.raises(ZeroDivisionError):
        made.start(torch.ones(8), torch.empty(16))
    return made.traffic


@pytest.mark.parametrize(
    "leave",
    [
        leave_a_walk_behind_its_first_hop,
        fail_while_keys_and_values_are_gathered,
        fail_in_an_exchange,
        fail_in_a_question,
        fail_in_a_gather,
    ],
)
def test_a_rank_that_leaves_a_message_unfinished_is_at_no_place(leave, monkeypatch):
    traffic = leave(monkeypatch)
    assert traffic.at is None
    with traffic.message("ring"):
        pass
    assert traffic.at is None, "a later message makes it good"
    traffic.clear()
    assert traffic.at == (0, 0)


def test_a_rank_with_a_receive_on_its_way_is_at_no_place():
    """A stage posts the next patch's ahead: it would take a message of another."""
    traffic = Traffic()
    traffic.posted = 1
    traffic.clear()
    assert traffic.at == (0, 0) and traffic.place is None
    traffic.is_complete = True  # the request that follows takes it
    assert traffic.place == (0, 0)


def test_ranks_are_at_one_place_after_as_many_messages_along_the_same_axes_in_one_order():
    def after(*axes):
        traffic = Traffic()
        for axis in axes:
            with traffic.message(axis):
                pass
        return traffic.at

    places = [after(), after("ring"), after("ulysses"), after("ring", "ulysses"), after("ulysses", "ring")]
    assert len({*places}) == len(places) and [number for number, _ in places] == [0, 1, 1, 2, 2]
    assert after("ring", "ulysses") == after("ring", "ulysses")


def test_a_whole_walk_is_one_message():
    made, walk = ring()
    assert len(list(walk)) == 3 and made.traffic.at[0] == 1


# -- what a rank answers


def handler(on_rank=lambda arguments, number: None, write=lambda output, out: Written):
    comm = SequenceComm(
        StandinExchange(0, 1), StandinRing(0, 1), StandinExchange(0, 1, "gather"), StopFlag(bool)
    )
    io = SimpleNamespace(
        arena=SimpleNamespace(follow=lambda: None),
        read=lambda arguments: {},
        write=write,
        settle=lambda: None,
        conditioning=SimpleNamespace(nbytes=0),
    )
    mesh = SimpleNamespace(rank=0, layout=Layout(), sequence=comm)
    made = RequestHandler(mesh, CPU, SimpleNamespace(), io)
    made.models["m"] = SimpleNamespace(
        method=SimpleNamespace(block_s=dict, begin=lambda _part: None),
        patches_id="",
        kept=None,
        recordings=None,
        on_rank=on_rank,
    )
    return made, comm.traffic


RANK = SimpleNamespace(tick=lambda: None)


def forward(model="m", **part):
    return Forward(
        request=1,
        model=model,
        part=Part(1, 0, **part),
        arguments=b"",
        patches_id="",
        out=(0, 0),
    )


def test_a_rank_that_fails_behind_its_forward_says_that_it_was_complete():
    made, _ = handler(write=fail)
    with pytest.raises(ZeroDivisionError):
        made.handle(forward(), [], RANK)
    assert made.stand(forward()) == Stand((0, 0), complete=True)
    inside, _ = handler(on_rank=fail)
    with pytest.raises(ZeroDivisionError):
        inside.handle(forward(), [], RANK)
    assert not inside.stand(forward()).complete


def test_a_rank_that_fails_before_it_begins_does_not_tell_where_it_was_the_last_time():
    made, traffic = handler(write=fail)
    with traffic.message("ring"):
        pass
    with pytest.raises(ZeroDivisionError):
        made.handle(forward(), [], RANK)
    with pytest.raises(KeyError):
        made.handle(forward("released", attempt=1), [], RANK)
    assert made.stand(forward("released")) == Stand((0, 0), complete=False)


def test_a_rank_that_left_others_waiting_takes_part_in_no_more_of_that_attempt():
    """It would send messages of the next evaluation to ranks that wait for those of this one."""
    called = []

    def on_rank(arguments, number):
        called.append(number)
        raise ZeroDivisionError

    made, _ = handler(on_rank)
    for error in (ZeroDivisionError, Skipped, Skipped):
        with pytest.raises(error):
            made.handle(forward(), [], RANK)
        assert made.stand(forward()) == Stand((0, 0))
    with pytest.raises(ZeroDivisionError):
        made.handle(forward(attempt=1), [], RANK)
    assert len(called) == 2
    loop = RankLoop(None, None, 0, DeviceMemory(CPU, 0))
    answer = loop._answered(
        forward(), lambda: made.handle(forward(), [], RANK), lambda: made.stand(forward())
    )
    assert (answer.kind, answer.at, answer.complete) == ("skipped", (0, 0), False)
    behind, _ = handler(write=fail)
    for _ in range(2):  # no rank waits for it
        with pytest.raises(ZeroDivisionError):
            behind.handle(forward(), [], RANK)


def test_a_lack_of_memory_is_told_before_the_cache_is_emptied():
    """That waits for the device, which may wait for another rank."""
    happened = []
    channel = SimpleNamespace(send=lambda answer: happened.append(answer.kind))
    memory = SimpleNamespace(empty_cache=lambda: happened.append("emptied"))
    loop = RankLoop(channel, None, 0, memory)
    for kind in ("memory", "error"):
        loop._send(Failed(request=1, kind=kind, phase="computing", text=""))
    assert happened == ["memory", "emptied", "error"]


def test_unlike_ranks_answer_with_the_sentence():
    def differ(arguments, number):
        raise Unlike(ModelError("The workers of one image differ."))

    made, _ = handler(differ)
    with pytest.raises(ModelError, match="differ"):
        made.handle(forward(), [], RANK)


@pytest.mark.parametrize(
    ("text", "answers", "dead"),
    [
        ("shapes do not match", True, False),
        ("CUDA error: device-side assert triggered", True, True),
        ("NCCL communicator was aborted on rank 1", True, True),
        ("HIP error: invalid device function", True, True),
        ("shapes do not match", False, True),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", True, False),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", False, True),
    ],
)
def test_a_rank_whose_device_is_dead_is_at_no_place(text, answers, dead, monkeypatch):
    """All ranks of such a device fail at one place, for ever."""

    def raise_it():
        raise RuntimeError(text)

    def asked(*_):
        if not answers:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return 10, 80

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    loop = RankLoop(None, None, 0, DeviceMemory(torch.device("cuda"), 0))
    answer = loop._answered(EndRun(request=1, model="m"), raise_it, lambda: Stand(HERE))
    assert answer.at == (None if dead else HERE)
