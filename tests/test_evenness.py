"""That all ranks have failed, or at one number of messages, proves nothing by itself. Each row is a
way in which such ranks are not even, and what tells.
"""

from types import SimpleNamespace

import pytest
import torch
from pipemesh.lab.bench.forwards import StandinExchange, StandinRing
from pipemesh.parallel_runtime.comm.exchange import StopFlag
from pipemesh.parallel_runtime.comm.in_step import Traffic
from pipemesh.parallel_runtime.comm.mesh import SequenceComm
from pipemesh.parallel_runtime.comm.parts import to_all
from pipemesh.parallel_runtime.comm.shard_gather import ShardGather
from pipemesh.parallel_runtime.layout import Layout
from pipemesh.parallel_runtime.methods.ring_attention import RingAttention
from pipemesh.parallel_runtime.patches import Part
from pipemesh.parallel_runtime.wire.messages import EndRun, Forward
from pipemesh.parallel_runtime.worker.device_memory import DeviceMemory
from pipemesh.parallel_runtime.worker.handler import RequestHandler, Stand
from pipemesh.parallel_runtime.worker.rank_loop import RankLoop
from pipemesh.pool.verdict import Meets

from .evenness import answered, done, failed, is_even

CPU = torch.device("cpu")
HERE, THERE, OTHER_ROAD = (3, 77), (4, 78), (3, 79)
ALONE, TOGETHER, STAGED = Meets.NOBODY, Meets.SEQUENCE, Meets.STAGES
BEHIND = {"complete": True}

TABLE = [
    # whom ranks meet, what they said, whether the group can go on
    (TOGETHER, [done(HERE), done(HERE)], True),
    (ALONE, [failed(None), done(None)], True),
    (TOGETHER, [failed(HERE), failed(HERE)], True),
    (TOGETHER, [failed(HERE), failed(THERE)], False),
    (TOGETHER, [failed(HERE), failed(OTHER_ROAD)], False),  # as many messages along other axes
    (TOGETHER, [failed(None, "some"), failed(None, "some")], False),  # unfinished, or a dead device, on all
    (TOGETHER, [failed(HERE), failed(None, "some")], False),
    # One has learnt what the other has not, such as which block follows which
    (TOGETHER, [failed(HERE), done(HERE)], False),
    (TOGETHER, [failed(HERE, **BEHIND), done(HERE)], True),  # such as the output's writer, without room
    (TOGETHER, [failed(HERE, **BEHIND), failed(HERE, **BEHIND)], True),
    (TOGETHER, [failed(HERE, **BEHIND), failed(THERE)], False),
    (TOGETHER, [failed(None, "some", **BEHIND), done(HERE)], False),  # the device died behind the forward
    (TOGETHER, [failed(HERE), done(HERE, cancelled=True)], False),
    (TOGETHER, [failed(HERE, **BEHIND), done(HERE, cancelled=True)], False),
    # Stages have unlike messages, and receive ahead
    (STAGED, [failed(HERE), failed(HERE)], False),
    (STAGED, [failed((0, 0), "none"), failed((0, 0), "none")], True),
    (STAGED, [failed((0, 0), "none"), done((1, 5))], False),
    (STAGED, [failed(HERE, **BEHIND), done(THERE)], True),
]


@pytest.mark.parametrize(("meets", "said", "even"), TABLE)
def test_the_places_of_ranks_say_whether_a_group_can_go_on(meets, said, even):
    assert is_even(answered(meets, dict(enumerate(said)))) is even


def test_a_group_of_which_one_owes_an_answer_is_not_even():
    request = answered(TOGETHER, {0: failed(HERE)})
    request.owing.add(1)
    assert not is_even(request)


# -- a message that is left unfinished


def fail(*_, **__):
    raise ZeroDivisionError


def ring():
    made = StandinRing(0, 3)
    return made, made.walk(torch.ones(2, 1, 1, 3, 4), [3, 3, 3], 0.0)


def leave_a_walk_behind_its_first_hop(monkeypatch):
    made, walk = ring()
    next(walk), next(walk)
    del walk  # its receive is posted, and what comes next would find the message
    return made.traffic


def fail_while_keys_and_values_are_gathered(monkeypatch):
    made, _ = ring()
    comm = SimpleNamespace(ring=made)
    with pytest.raises(ZeroDivisionError):
        RingAttention(comm, fail, None).gather(torch.ones(2, 1, 1, 3, 4), [3, 3, 3], 0.0)
    return made.traffic


def fail_in_an_exchange(monkeypatch):
    made = StandinExchange(0, 2)
    monkeypatch.setattr(made, "_exchange", fail)
    with pytest.raises(ZeroDivisionError):
        made.all_to_all([to_all(torch.ones(8), 2)], [torch.empty(2, 8)], 0.0)
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
        made.start(1, 0, torch.ones(8), torch.empty(16))
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


def test_a_whole_walk_and_its_going_through_are_one_message_each():
    made, walk = ring()
    assert len(list(walk)) == 3 and made.traffic.at[0] == 1
    made.go_through(next(iter(made._laid)), 1.0)
    assert made.traffic.at[0] == 2


# -- what a rank answers


def handler(on_rank=lambda arguments, number: None, write=lambda output, out: None, **more):
    comm = SequenceComm(
        StandinExchange(0, 1), StandinRing(0, 1), StandinExchange(0, 1, "gather"), StopFlag(bool)
    )
    io = SimpleNamespace(
        arena=SimpleNamespace(follow=lambda nbytes: None),
        read=lambda arguments: {},
        write=write,
        settle=lambda: None,
        conditioning=SimpleNamespace(nbytes=0),
    )
    mesh = SimpleNamespace(rank=0, layout=Layout(), sequence=comm)
    made = RequestHandler(mesh, CPU, SimpleNamespace(), io)
    method = SimpleNamespace(
        fail=lambda number: None, facts=SimpleNamespace(messages_done="all", confirmed=0)
    )
    made.models["m"] = SimpleNamespace(
        method=method, begin=lambda *_: None, patches_id="", kept=None, on_rank=on_rank, **more
    )
    return made, comm.traffic


RANK = SimpleNamespace(tick=lambda: None)


def forward(model="m"):
    return Forward(
        request=1, model=model, part=Part(1, 0), arguments=b"", arena_bytes=0, patches_id="", out=(0, 0)
    )


def test_a_rank_that_fails_behind_its_forward_says_that_it_was_complete():
    made, _ = handler(write=fail)
    with pytest.raises(ZeroDivisionError):
        made.handle(forward(), [], RANK)
    assert made.stand(forward()) == Stand("all", (0, 0), complete=True)
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
        made.handle(forward("released"), [], RANK)
    assert made.stand(forward("released")) == Stand("none", (0, 0), complete=False)


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
    answer = loop._answered(EndRun(request=1, model="m"), raise_it, lambda: Stand("all", HERE))
    assert answer.at == (None if dead else HERE)
