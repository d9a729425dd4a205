"""What the pool makes of ranks' answers: go on, or end with a sentence. A pure function, by
table.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipemesh.parallel_runtime.errors import ModelError, NoRoom, OutOfMemory, PoolFailed, PoolSpent, Refused
from pipemesh.parallel_runtime.wire.messages import Done, Failed, Memory
from pipemesh.pool.conversation import Conversation
from pipemesh.pool.supervisor import NEVER_STARTED
from pipemesh.pool.verdict import (
    LEAVE_WAIT_S,
    OTHERS_WAIT_S,
    Facts,
    Meets,
    SentRequest,
    judge,
    sentence_of_death,
    sentence_of_stall,
    wait_after_failure,
)

MEMORY = Memory(1 << 20, 2 << 20, 3 << 20)
DONE, LEFT, SILENT = "done", "cancelled", None
DEAD = "dead"  # the device, behind the last message
START, HERE, THERE, INSIDE = (0, 0), (3, 77), (4, 78), None  # places; the last: in an unfinished message
OTHER_ROAD = (3, 79)  # as many messages, along other axes
ERROR, MEMORY_FULL, REFUSED, ROOM, SKIPPED = "error", "memory", "refused", "room", "skipped"


def answer(said: Any) -> Done | Failed:
    """``said``: a kind of failure, behind the last message, or (kind, place)."""
    if said in (DONE, LEFT):
        return Done(request=1, memory=MEMORY, cancelled=said == LEFT)
    kind, at = said if isinstance(said, tuple) else (said, HERE)
    where = {"kind": kind, "at": at, "complete": not isinstance(said, tuple)}
    if said == DEAD:
        where = {"kind": ERROR, "at": INSIDE, "complete": True}
    return Failed(request=1, phase="computing", text="that", trace="", memory=MEMORY, **where)


def request(meets: Meets, *said: Any, ranks: tuple[int, ...] = ()) -> SentRequest:
    """What each rank of the group has said; SILENT: it still owes an answer."""
    group = ranks or tuple(range(len(said)))
    made = SentRequest(1, group, {*group}, meets)
    for rank, one in zip(group, said, strict=True):
        if one is not SILENT:
            made.take(rank, answer(one))
    return made


def facts(stages: int = 1) -> Facts:
    return Facts(("cpu",) * 4, stages=stages)


ALONE, TOGETHER, STAGED = Meets.NOBODY, Meets.SEQUENCE, Meets.STAGES
TABLE = [
    # whom ranks meet, what they said, the pool -> the error (None: go on), the rank it is about
    (ALONE, [DONE, DONE], {}, None, 0),
    (ALONE, [ERROR, DONE], {}, ModelError, 0),
    (ALONE, [DONE, REFUSED], {}, Refused, 1),
    (ALONE, [DONE, MEMORY_FULL], {}, OutOfMemory, 1),
    (ALONE, [ERROR, SILENT], {}, PoolFailed, 0),
    (ALONE, [(ERROR, INSIDE), DONE], {}, ModelError, 0),
    # All at one place, whose lack of memory is told first
    (TOGETHER, [(ERROR, HERE), (ERROR, HERE)], {}, ModelError, 0),
    (TOGETHER, [(REFUSED, START), (REFUSED, START)], {}, Refused, 0),
    (TOGETHER, [(ROOM, HERE), (ROOM, HERE)], {}, NoRoom, 0),
    (TOGETHER, [(ERROR, HERE), (MEMORY_FULL, HERE)], {}, OutOfMemory, 1),
    (TOGETHER, [(SKIPPED, START), (ERROR, START)], {}, ModelError, 1),
    (TOGETHER, [(ERROR, HERE), (ERROR, THERE)], {}, PoolFailed, 0),
    (TOGETHER, [(ERROR, HERE), (ERROR, OTHER_ROAD)], {}, PoolFailed, 0),
    (TOGETHER, [(ERROR, HERE), (ERROR, HERE), (ERROR, THERE)], {}, PoolFailed, 0),
    (TOGETHER, [(ERROR, INSIDE), (ERROR, INSIDE)], {}, PoolFailed, 0),  # or a dead device, on all
    (TOGETHER, [(ERROR, HERE), (MEMORY_FULL, INSIDE)], {}, PoolSpent, 1),
    # One has learnt what the other has not, such as which block follows which
    (TOGETHER, [DONE, (ERROR, HERE)], {}, PoolFailed, 1),
    (TOGETHER, [DONE, (MEMORY_FULL, HERE)], {}, PoolSpent, 1),
    (TOGETHER, [LEFT, (ERROR, HERE)], {}, PoolFailed, 1),
    (TOGETHER, [SILENT, (ERROR, HERE)], {}, PoolFailed, 1),
    (TOGETHER, [SILENT, MEMORY_FULL], {}, PoolSpent, 1),
    # Behind the last message, such as the output's writer, without room
    (TOGETHER, [DONE, ERROR], {}, ModelError, 1),
    (TOGETHER, [DONE, MEMORY_FULL], {}, OutOfMemory, 1),
    (TOGETHER, [ERROR, MEMORY_FULL], {}, OutOfMemory, 1),
    (TOGETHER, [(ERROR, HERE), MEMORY_FULL], {}, PoolSpent, 1),
    (TOGETHER, [DONE, DEAD], {}, PoolFailed, 1),
    (TOGETHER, [LEFT, ERROR], {}, PoolFailed, 1),
    # A stage that fails takes and sends its messages all the same
    (STAGED, [ERROR, DONE], {"stages": 2}, ModelError, 0),
    (STAGED, [REFUSED, LEFT], {"stages": 2}, Refused, 0),
    (STAGED, [DONE, (ERROR, THERE)], {"stages": 2}, PoolFailed, 1),  # the next patch would find its message
    (STAGED, [(ERROR, HERE), (ERROR, HERE)], {"stages": 2}, PoolFailed, 0),  # stages have unlike messages
    (STAGED, [(ERROR, START), (ERROR, START)], {"stages": 2}, ModelError, 0),
    (STAGED, [(ERROR, START), DONE], {"stages": 2}, PoolFailed, 0),
    (STAGED, [(REFUSED, START), SILENT], {"stages": 2}, PoolFailed, 0),
    (STAGED, [DONE, (MEMORY_FULL, INSIDE)], {"stages": 2}, PoolSpent, 1),
    (STAGED, [ERROR, DONE, DONE, DONE], {"stages": 2}, ModelError, 0),
]


@pytest.mark.parametrize(("meets", "said", "pool", "error", "rank"), TABLE)
def test_what_ranks_say_decides_whether_the_pool_goes_on(meets, said, pool, error, rank):
    verdict = judge([request(meets, *said)], facts(**pool))
    if error is None:
        assert verdict is None
    else:
        raised, about = verdict
        assert (type(raised), about) == (error, rank)
        assert ("a fresh pool will be started" in str(raised)) == (error is PoolFailed)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([ERROR, ERROR], None),
        ([ERROR, SILENT], PoolFailed),
        ([DONE, (ERROR, INSIDE)], PoolFailed),
        ([DONE, ERROR], None),
    ],
)
def test_what_a_cancelled_run_failed_with_is_told_only_where_the_pool_cannot_go_on(said, error):
    verdict = judge([request(STAGED, *said)], facts(stages=2), forgiven=True)
    assert (verdict and type(verdict[0])) == error


def test_the_earliest_request_names_what_went_wrong_first():
    first, later = request(STAGED, REFUSED, DONE), request(STAGED, ERROR, ERROR)
    assert type(judge([first, later], facts(stages=2))[0]) is Refused


@pytest.mark.parametrize(
    ("meets", "failure", "wait_s"),
    [
        (ALONE, ERROR, math.inf),
        (TOGETHER, ERROR, math.inf),
        (ALONE, (ERROR, INSIDE), math.inf),
        (TOGETHER, (ERROR, HERE), OTHERS_WAIT_S),
        (TOGETHER, DEAD, OTHERS_WAIT_S),
        (STAGED, ERROR, LEAVE_WAIT_S),
        (STAGED, (ERROR, START), OTHERS_WAIT_S),
    ],
)
def test_the_others_are_waited_for_as_long_as_they_may_still_answer(meets, failure, wait_s):
    assert wait_after_failure([request(meets, failure, SILENT)]) == wait_s


SAID = st.sampled_from(
    [DONE, LEFT, SILENT, ERROR, MEMORY_FULL, REFUSED, ROOM]
    + [(kind, at) for kind in (ERROR, MEMORY_FULL, REFUSED) for at in (START, HERE, INSIDE)]
)


@given(st.sampled_from(Meets), st.lists(SAID, min_size=1, max_size=4), st.booleans())
def test_a_pool_never_goes_on_with_a_rank_that_owes_an_answer_or_a_message_left_over(meets, said, forgiven):
    asked = request(meets, *said)
    verdict = judge([asked], facts(), forgiven=forgiven)
    failed = any(isinstance(one, Failed) for one in asked.answers.values())
    assert verdict is None or failed
    is_unfinished = any(isinstance(one, tuple) and one[1] is INSIDE for one in said)
    if failed and (asked.owing or (is_unfinished and meets is not ALONE)):
        assert isinstance(verdict[0], (PoolFailed, PoolSpent))


CAUSES = {
    None: "closed its connection",
    3: "ended with exit status 3",
    NEVER_STARTED: "could not be forked (why is in ComfyUI's log; with PIPEMESH_FORK=0 workers start without it)",
    -11: "ended with signal 11",
    -9: "was killed (signal 9; the system does this when memory runs out)",
    -7: "was killed (signal 7; its checkpoint was cut short on disk, or shared memory ran out)",
}
AGAIN = "run again, a fresh pool will be started"


@pytest.mark.parametrize("status", CAUSES)
def test_a_death_is_one_sentence_with_its_cause_and_the_next_move(status):
    sentence = f"Rank 1 on cuda:1 {CAUSES[status]} while loading: {AGAIN}."
    assert sentence_of_death("Rank 1 on cuda:1", "loading", status) == sentence


def test_a_stall_names_the_limit_and_where_machines_meet_the_ports():
    sentence = (
        f"Rank 1 on cpu made no progress for 2 s while computing: {AGAIN} (PIPEMESH_STALL_S sets the limit)."
    )
    assert sentence_of_stall("Rank 1 on cpu", "computing", 2.0) == sentence
    joining = "Rank 1 on cpu made no progress for 2 s while joining: with several machines, see that every port is open"
    assert sentence_of_stall("Rank 1 on cpu", "joining", 2.0).startswith(joining)


def test_a_rank_answers_a_request_once_what_it_says_later_is_dropped():
    request = SentRequest(1, (0, 1), {0, 1})
    first, later = answer(DONE), answer(ERROR)
    request.take(0, first)
    request.take(0, later)
    assert request.answers == {0: first} and not request.has_failed and request.owing == {1}


def test_ranks_have_so_long_to_leave_from_the_first_stop_on():
    stalls = SimpleNamespace(since=0.0)
    conversation = SimpleNamespace(_leave_by=math.inf, _stalls=stalls, call_back=lambda: None)
    Conversation._cancel(conversation)
    first = conversation._leave_by, stalls.since
    Conversation._cancel(conversation)
    assert (conversation._leave_by, stalls.since) == first and 0 < first[1] < first[0] < math.inf
