"""Answers of the ranks of one request, by which the pool judges whether they are even."""

from pipemesh.parallel_runtime.wire.messages import Done, Failed, Memory
from pipemesh.pool.verdict import SentRequest

MEMORY = Memory(0, 0, 0)


def answered(meets, said):
    """``said``: rank -> its answer."""
    request = SentRequest(1, tuple(said), {*said}, meets)
    for rank, one in said.items():
        request.take(rank, one)
    return request


def done(cancelled=False):
    return Done(request=1, memory=MEMORY, cancelled=cancelled)


def failed(at, complete=False, kind="error"):
    return Failed(request=1, kind=kind, phase="computing", text="that", at=at, complete=complete)
