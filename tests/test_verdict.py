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
DONE, SILENT = "done", None
ERROR, MEMORY_FULL, REFUSED, ROOM = "error", "memory", "refused", "room"


def answer(said: Any) -> Done | Failed:
    """``said``: a kind of failure, or (kind, messages done)."""
    if said == DONE:
        return Done(request=1, memory=MEMORY)
    kind, messages_done = said if isinstance(said, tuple) else (said, "all")
    return Failed(
        request=1,
        kind=kind,
        phase="computing",
        text="that",
        trace="",
        memory=MEMORY,
        messages_done=messages_done,
    )


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
    (TOGETHER, [ERROR, ERROR], {}, ModelError, 0),
    (TOGETHER, [REFUSED, REFUSED], {}, Refused, 0),
    (TOGETHER, [ROOM, ROOM], {}, NoRoom, 0),
    (TOGETHER, [MEMORY_FULL, MEMORY_FULL], {}, OutOfMemory, 0),
    (TOGETHER, [ERROR, MEMORY_FULL], {}, OutOfMemory, 1),  # which the other one's error follows from
    (TOGETHER, [DONE, ERROR], {}, ModelError, 1),  # it went through the messages that others wait for
    (TOGETHER, [DONE, MEMORY_FULL], {}, OutOfMemory, 1),
    (TOGETHER, [DONE, (ERROR, "some")], {}, PoolFailed, 1),
    # Messages may be left that only some have issued
    (TOGETHER, [(ERROR, "some"), (ERROR, "some")], {}, PoolFailed, 0),
    (TOGETHER, [SILENT, ERROR], {}, PoolFailed, 1),
    (TOGETHER, [SILENT, MEMORY_FULL], {}, PoolSpent, 1),
    (TOGETHER, [(ERROR, "some"), (MEMORY_FULL, "some")], {}, PoolSpent, 1),
    (STAGED, [ERROR, DONE], {"stages": 2}, ModelError, 0),
    (STAGED, [REFUSED, DONE], {"stages": 2}, Refused, 0),
    (STAGED, [DONE, (ERROR, "some")], {"stages": 2}, PoolFailed, 1),  # the next patch would find its message
    (STAGED, [DONE, (ERROR, "none")], {"stages": 2}, PoolFailed, 1),
    (STAGED, [(ERROR, "none"), (ERROR, "none")], {"stages": 2}, ModelError, 0),
    (STAGED, [(REFUSED, "none"), SILENT], {"stages": 2}, PoolFailed, 0),
    (STAGED, [DONE, (MEMORY_FULL, "some")], {"stages": 2}, PoolSpent, 1),
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
        ([DONE, (ERROR, "some")], PoolFailed),
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
    ("failing", "wait_s"),
    [
        ([request(ALONE, ERROR, SILENT)], math.inf),
        ([request(TOGETHER, ERROR, SILENT)], math.inf),
        ([request(TOGETHER, (ERROR, "some"), SILENT)], OTHERS_WAIT_S),
        ([request(STAGED, ERROR, SILENT)], LEAVE_WAIT_S),
        ([request(STAGED, (ERROR, "none"), SILENT)], OTHERS_WAIT_S),
    ],
)
def test_the_others_are_waited_for_as_long_as_they_may_still_answer(failing, wait_s):
    assert wait_after_failure(failing) == wait_s


SAID = st.sampled_from(
    [DONE, SILENT, ERROR, MEMORY_FULL, REFUSED, ROOM, (ERROR, "none"), (ERROR, "some"), (REFUSED, "none")]
)


@given(
    st.sampled_from(Meets),
    st.lists(SAID, min_size=1, max_size=4),
    st.booleans(),
)
def test_a_pool_never_goes_on_with_a_rank_that_owes_an_answer_or_a_message_left_over(meets, said, forgiven):
    asked = request(meets, *said)
    verdict = judge([asked], facts(), forgiven=forgiven)
    failed = any(isinstance(one, Failed) for one in asked.answers.values())
    assert verdict is None or failed
    if failed and (asked.owing or (ERROR, "some") in said):
        assert isinstance(verdict[0], (PoolFailed, PoolSpent))


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (None, "closed its connection"),
        (3, "ended with exit status 3"),
        (
            NEVER_STARTED,
            "could not be forked (why is in ComfyUI's log; with PIPEMESH_FORK=0 workers start without it)",
        ),
        (-11, "ended with signal 11"),
        (-9, "was killed (signal 9; the system does this when memory runs out)"),
        (-7, "was killed (signal 7; its checkpoint was cut short on disk, or shared memory ran out)"),
    ],
)
def test_a_death_is_one_sentence_with_its_cause_and_the_next_move(status, cause):
    assert (
        sentence_of_death("Rank 1 on cuda:1", "loading", status)
        == f"Rank 1 on cuda:1 {cause} while loading: run again, a fresh pool will be started."
    )


def test_a_stall_names_the_limit_and_where_machines_meet_the_ports():
    assert (
        sentence_of_stall("Rank 1 on cpu", "computing", 2.0)
        == "Rank 1 on cpu made no progress for 2 s while computing: run again, a fresh pool will be started"
        " (PIPEMESH_STALL_S sets the limit)."
    )
    assert "see that every port is open" in sentence_of_stall("Rank 1 on cpu", "joining", 2.0)


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
