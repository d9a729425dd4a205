"""What the pool waits for once ranks have failed, and what it makes of it: in every order of
answers, on a clock that the test moves.
"""

from itertools import permutations, product
from types import MappingProxyType, SimpleNamespace

import pytest
from pipemesh.parallel_runtime.errors import (
    ModelError,
    OutOfMemory,
    PipeMeshError,
    PoolFailed,
    PoolSpent,
    RunCancelled,
)
from pipemesh.parallel_runtime.wire.messages import Done, Failed
from pipemesh.pool import conversation, verdict
from pipemesh.pool.conversation import Conversation
from pipemesh.pool.pool import never
from pipemesh.pool.ranks import Lost
from pipemesh.pool.verdict import Facts

from ..kit.fake_pools import MAKE, Clock
from .test_verdict import MEMORY

LONG_S, NEVER_S = 100.0, 1e9
DONE, ERROR, FULL = "done", "error", "memory"  # behind the last message
UNEVEN, UNEVEN_FULL, UNTOUCHED, DIES = "inside a message", "memory, inside", "before the first", "dies"


class Ranks:
    """Stands for ``Ranks``: ``script`` has (second, rank, request, deed); one answer at a time."""

    def __init__(self, clock, script):
        self._clock, self._script = clock, sorted(script, key=lambda one: one[:3])

    def listen(self, wait_s):
        if not self._script or self._script[0][0] > self._clock.now + wait_s:
            self._clock.now += wait_s
            assert self._clock.now < LONG_S, "who waits does so for ever"
            return []
        second, rank, number, deed = self._script.pop(0)
        self._clock.now = max(self._clock.now, second)
        if deed == DIES:
            raise Lost(f"Rank {rank} on cpu ended", rank)
        return [(rank, answer_to(number, deed))]

    def send(self, *sent):
        pass

    def cancel(self, number):
        pass

    def check(self, owing):
        pass


def answer_to(number, deed):
    if deed == DONE:
        return Done(request=number, memory=MEMORY)
    where = {"request": number, "phase": "computing", "memory": MEMORY, "text": "that", "trace": ""}
    if deed in (UNEVEN, UNEVEN_FULL):
        return Failed(kind=FULL if deed == UNEVEN_FULL else ERROR, at=None, **where)
    return Failed(kind=ERROR if deed == UNTOUCHED else deed, at=(0, 0), complete=deed != UNTOUCHED, **where)


@pytest.fixture
def talking(monkeypatch):
    """script, groups -> a conversation with ranks, each group of which was sent a request, and its
    clock, which is at 0; no rank stalls. ``moves``: rank -> the second until which it makes
    progress.
    """

    def talking(script, *groups, stages=1, moves=MappingProxyType({}), kind="Forward"):
        clock = Clock()
        monkeypatch.setattr(conversation, "time", clock)
        board = SimpleNamespace(
            phase=lambda rank: "computing", progress=lambda rank: min(clock.now, moves.get(rank, 0.0))
        )
        progress = SimpleNamespace(look=lambda *_, **__: None, clear=lambda: None, end=lambda: None)
        facts = Facts(("cpu",) * 4, stages)
        made = Conversation(Ranks(clock, script), board, facts, NEVER_S, progress)
        for number, group in enumerate(groups, 1):
            made.submit(MAKE[kind](number), group, (), never)
        return made, clock

    return talking


def lost_in(talk, number=1):
    """How the pool is lost while this request is collected."""
    with pytest.raises(Lost) as lost:
        talk.collect(number, never)
    return lost.value


def outcome(talk):
    """What a caller hears who collects in order and abandons the rest after an error."""
    try:
        for number in list(talk.in_flight):
            talk.collect(number, never)
    except PipeMeshError as error:
        talk.abandon()
        return type(error)
    return None


ERRORS = {DONE: None, ERROR: ModelError, FULL: OutOfMemory}


def orders(answers):
    """Every order of (rank, request) in which each rank answers its requests in turn."""
    for order in permutations(answers):
        if all(one <= other for at, one in enumerate(order) for other in order[at:] if one[0] == other[0]):
            yield order


@pytest.mark.parametrize(
    ("groups", "times"),
    [(((0,), (1,)), 2), (((0, 1), (2, 3)), 1)],
    ids=["two evaluations for each rank", "two ranks for each evaluation"],
)
def test_groups_that_fail_evenly_leave_the_pool_up_in_every_order_of_their_answers(talking, groups, times):
    """Whichever fails first, one that fails behind it is waited for too."""
    asked = groups * times
    for order in orders([(rank, number) for number, group in enumerate(asked, 1) for rank in group]):
        for deeds in product(ERRORS, repeat=2):
            script = [
                (float(at), rank, number, deeds[(number - 1) % 2]) for at, (rank, number) in enumerate(order)
            ]
            talk, _ = talking(script, *asked)
            assert outcome(talk) in ({*map(ERRORS.get, deeds)} - {None} or {None})
            assert not talk.in_flight


def test_a_group_that_has_failed_evenly_sets_no_limit_to_another(talking):
    """No stage of the first has room, which they say at once; a rank of the second is slow."""
    script = [(0.0, 0, 1, UNTOUCHED), (0.0, 1, 1, UNTOUCHED), (1.0, 2, 2, ERROR), (9.0, 3, 2, DONE)]
    talk, clock = talking(script, (0, 1), (2, 3), stages=2)
    with pytest.raises(ModelError):
        talk.collect(2, never)
    assert clock.now == 9.0


@pytest.mark.parametrize("awaited", [1, 2])
def test_a_rank_out_of_step_ends_the_pool_whatever_another_group_failed_with(talking, awaited):
    """Also one that would go on working for long."""
    for behind in ([(0.5, 3, 2, ERROR)], [(0.5, 3, 2, DONE)], []):
        talk, clock = talking([(0.0, 2, 2, ERROR), (0.2, 0, 1, UNEVEN), *behind], (0, 1), (2, 3))
        assert str(lost_in(talk, awaited)).startswith("Rank 0 on cpu failed while computing")
        assert clock.now < 10.0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_moves_is_waited_for_after_another_failed_and_one_that_stands_still_is_not(
    talking, stages
):
    """Long enough to fail as the other did: a GPU may be blocks behind it."""
    moving = {"stages": stages, "moves": {1: 20.0}}
    for deed, error in ((UNEVEN, PoolFailed), (UNEVEN_FULL, PoolSpent)):
        talk, clock = talking([(0.0, 0, 1, deed)], (0, 1), **moving)
        assert lost_in(talk).error is error and 20.0 < clock.now <= 20.0 + verdict.OTHERS_WAIT_S + 1.0
    talk, clock = talking([(0.0, 0, 1, UNTOUCHED), (20.0, 1, 1, UNTOUCHED)], (0, 1), **moving)
    with pytest.raises(ModelError):
        talk.collect(1, never)
    assert not talk.in_flight


@pytest.mark.parametrize(
    ("deed", "rank", "error"),
    [
        (UNEVEN_FULL, 0, PoolSpent),
        (FULL, 0, PoolSpent),
        (ERROR, 0, PoolFailed),
        (UNEVEN, 1, PoolFailed),  # inside a message that stayed unfinished, because the peer was dead
    ],
)
def test_a_failure_that_was_told_beats_the_death_that_it_caused(talking, deed, rank, error):
    lost = lost_in(talking([(0.0, 0, 1, deed), (0.5, 1, 1, DIES)], (0, 1))[0])
    assert (lost.rank, lost.error) == (rank, error)


def test_a_death_in_another_group_is_told_whatever_failed_before(talking):
    talk, _ = talking([(0.0, 0, 1, FULL), (0.5, 2, 2, DIES)], (0, 1), (2,))
    assert str(lost_in(talk)).startswith("Rank 2 on cpu ended")


# -- Stop


@pytest.mark.parametrize("deed", [UNEVEN, UNTOUCHED])
def test_stop_makes_the_wait_for_a_silent_rank_shorter(talking, deed):
    """Pressed before the other rank failed, or behind it."""
    waited = []
    for failed_at, stopped_at in ((0.0, NEVER_S), (0.0, 0.5), (0.5, 0.0)):
        talk, clock = talking([(failed_at, 0, 1, deed)], (0, 1))
        with pytest.raises(Lost, match=r"^Rank 0 on cpu failed while computing"):
            talk.collect(1, lambda at=stopped_at, clock=clock: clock.now >= at)
        waited.append(clock.now)
        if stopped_at != NEVER_S:
            assert clock.now - max(failed_at, stopped_at) < 1.0 + 3 * conversation.POLL_S
    assert max(waited[1:]) < waited[0]


@pytest.mark.parametrize("deed", [ERROR, FULL])
@pytest.mark.parametrize("kind", ["Load", "Forward"])
def test_a_rank_that_answers_long_after_another_failed_and_stop_was_pressed_costs_no_pool(
    talking, kind, deed
):
    talk, clock = talking([(0.0, 0, 1, deed), (60.0, 1, 1, DONE)], (0, 1), kind=kind)
    with pytest.raises(RunCancelled):
        talk.collect(1, lambda: clock.now > 0.5)
    assert clock.now < 60.0 and 1 in talk.in_flight
    talk.settle(never)
    assert not talk.in_flight
