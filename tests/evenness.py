"""The rule by which a failed group is known to be even from the place alone at which each rank is,
``at``, and ``complete``: none has a message on its way that others miss. It must never say so where
the rule of today, by ``messages_done``, does not.
"""

from pipemesh.parallel_runtime.wire.messages import Done, Failed, Memory
from pipemesh.pool import conversation
from pipemesh.pool.verdict import Meets, SentRequest, is_out_of_step

MEMORY = Memory(0, 0, 0)


def is_even(request):
    """Whether all ranks of a request's group can go on."""
    answers, failures = [*request.answers.values()], [*request.failures.values()]
    if request.owing:
        return False
    if not failures or request.meets is Meets.NOBODY:
        return True
    others = [one for one in answers if isinstance(one, Done)]
    if all(one.complete and one.at is not None for one in failures):
        return not any(one.cancelled for one in others)
    places = {one.at for one in failures}
    if others or len(places) != 1 or None in places:
        return False
    return request.meets is not Meets.STAGES or places == {(0, 0)}


def held(request):
    """Whether it is even by the place alone; then it is so by the rule of today."""
    even = is_even(request)
    assert not (even and is_out_of_step(request)), request
    return even


def answered(meets, said):
    """``said``: rank -> its answer."""
    request = SentRequest(1, tuple(said), {*said}, meets)
    for rank, one in said.items():
        request.take(rank, one)
    return request


def done(at, cancelled=False):
    return Done(request=1, memory=MEMORY, at=at, cancelled=cancelled)


def failed(at, messages_done="all", complete=False, kind="error"):
    return Failed(
        request=1,
        kind=kind,
        phase="computing",
        text="that",
        messages_done=messages_done,
        at=at,
        complete=complete,
    )


def watched(patch):
    """Hold every verdict of a pool to it."""
    real = conversation.judge

    def judge(requests, facts, **how):
        for request in requests:
            held(request)
        return real(requests, facts, **how)

    patch.setattr(conversation, "judge", judge)
