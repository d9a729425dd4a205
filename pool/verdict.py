"""Judge the answers of ranks, or their silence: go on, or tear the pool down with a sentence.

Pure functions: the pool asks them, raises what they return, and ends its processes if the error is
PoolFailed or PoolSpent.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..parallel_runtime.errors import (
    ModelError,
    NoRoom,
    OutOfMemory,
    PipeMeshError,
    PoolFailed,
    PoolSpent,
    Refused,
)
from ..parallel_runtime.wire.messages import Done, Failed, FromRank
from ..parallel_runtime.wire.segment import mib
from .supervisor import NEVER_STARTED, SERVER_ENDED

# After one rank has failed, the others are waited for until none of them has moved for so long: to
# leave early, or to fail too where they may be waiting for the one that failed
LEAVE_WAIT_S = 10.0
OTHERS_WAIT_S = 3.0
STOPPED_WAIT_S = 1.0  # in all, from the moment when the run was stopped
AGAIN = "run again, a fresh pool will be started"
DEADLY = {
    signal.SIGKILL: "the system does this when memory runs out",
    signal.SIGBUS: "its checkpoint was cut short on disk, or shared memory ran out",
}


class Meets(Enum):
    """Says with which other ranks a rank exchanges messages while it handles a request."""

    NOBODY = "each rank works by itself"
    SEQUENCE = "all ranks of the group meet in collectives: if one fails alone, the others wait for it"
    STAGES = "ranks hand hidden states on to the next stage: the others can leave early"


@dataclass
class SentRequest:
    """A request that was sent to ``group``. ``owing`` are the ranks that have not answered.
    ``title`` is the title of the requested model. ``awaited``: a caller will collect the answers.
    ``due``: the time by which its ranks must have answered, because a rank has failed that they may
    be waiting for.
    """

    number: int
    group: tuple[int, ...]
    owing: set[int]
    meets: Meets = Meets.NOBODY
    title: str = ""
    awaited: bool = True
    due: float = math.inf
    answers: dict[int, FromRank] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def failures(self) -> dict[int, Failed]:
        return {rank: answer for rank, answer in self.answers.items() if isinstance(answer, Failed)}

    def take(self, rank: int, answer: FromRank) -> None:
        """Notes a rank's answer. That of a rank that owes none is dropped."""
        if rank in self.owing:
            self.owing.discard(rank)
            self.answers[rank] = answer
            self.has_failed |= isinstance(answer, Failed)


@dataclass(frozen=True)
class Facts:
    """The facts of a pool on which a verdict depends, beside the answers. ``names`` has each rank's
    device, ``speeds`` the devices' speeds in percent of the fastest.
    """

    names: Sequence[str]
    stages: int = 1
    speeds: tuple[int, ...] = ()

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.names)))

    def where(self, rank: int) -> str:
        return f"Rank {rank} on {self.names[rank]}"


def wait_after_failure(side: Sequence[SentRequest]) -> float:
    """Returns for how many seconds none of the other ranks of ``connected`` requests may move after
    some have failed. It is infinite if they answer by themselves, however long that takes.
    """
    failing = [one for one in side if one.has_failed and one.meets is not Meets.NOBODY]
    failures = [failure for one in failing for failure in one.failures.values()]
    if not all(one.complete and one.at is not None for one in failures):
        return OTHERS_WAIT_S
    return LEAVE_WAIT_S if any(one.meets is Meets.STAGES for one in failing) else math.inf


def connected(requests: Sequence[SentRequest]) -> list[list[SentRequest]]:
    """Returns each failed request together with the requests whose ranks may wait for its ranks:
    they have a rank in common, directly or through a third request. Other groups work on and have
    no part in its verdict.

    Example: rank 0 failed in a request of ranks 0 and 1, which were asked twice, and rank 3 failed
    in a request of ranks 2 and 3: that is a list of two requests, and a list of one.
    """
    sides: list[list[SentRequest]] = []
    for failed in (one for one in requests if one.has_failed):
        if any(failed is one for side in sides for one in side):
            continue
        ranks = {*failed.group}
        while grown := {rank for one in requests if ranks & {*one.group} for rank in one.group} - ranks:
            ranks |= grown
        sides.append([one for one in requests if ranks & {*one.group}])
    return sides


def judge(
    requests: Sequence[SentRequest], facts: Facts, *, forgiven: bool = False
) -> tuple[PipeMeshError, int] | None:
    """Returns the error to raise and the rank that it is about, or None. ``requests`` are the
    failed requests in flight, and those ``connected`` with them.

    The pool goes on if the ranks of each request ``are_even``. Else the error is PoolSpent for a
    lack of memory, and PoolFailed for all else.
    ``forgiven``: the requests belong to a cancelled run, so only that is told.
    """
    failures = first_failures(requests)
    if not failures:
        return None
    even = all(map(are_even, requests))
    if forgiven and even:
        return None
    rank, failure = first_cause(failures)
    return error_of(rank, failure, facts, warm=even), rank


def are_even(request: SentRequest) -> bool:
    """Returns whether all ranks of a request can go on: all have answered, no rank has a message on
    its way that another rank misses, and no rank knows a decision that another does not.

    That is so if nobody failed; if each failed rank left no message unfinished and no other rank
    was cancelled before its end; or if all failed at one place. Stages of a pipeline are at one
    place only before their first message.
    """
    failures = [*request.failures.values()]
    if request.owing:
        return False
    if not failures or request.meets is Meets.NOBODY:
        return True
    is_pipeline = request.meets is Meets.STAGES
    if all(one.complete and one.at is not None for one in failures):
        return is_pipeline or not any(
            isinstance(one, Done) and one.cancelled for one in request.answers.values()
        )
    places = {one.at for one in failures}
    if len(failures) < len(request.group) or len(places) > 1 or None in places:
        return False
    if any(one.complete for one in failures):  # it has learnt what the others have not
        return False
    return not is_pipeline or places == {(0, 0)}


def error_of(rank: int, failure: Failed, facts: Facts, warm: bool) -> PipeMeshError:
    """Makes the error of one rank's failure, in one sentence. ``warm``: the pool goes on."""
    if warm and failure.kind in ("room", "refused"):
        return (NoRoom if failure.kind == "room" else Refused)(failure.text)
    sentence = f"{facts.where(rank)} failed while {failure.phase}: {failure.text}"
    if failure.kind == "memory":
        memory = failure.memory
        of_prompts = f" and {mib(memory.conditioning)} by conditioning" if memory.conditioning >> 20 else ""
        held = f"{mib(memory.model)} held by models{of_prompts}"
        cause = (failure.text.splitlines() or ["no details"])[0]  # a bare MemoryError has no text
        return (OutOfMemory if warm else PoolSpent)(
            f"{facts.where(rank)} ran out of memory while {failure.phase} ({mib(memory.free)} of"
            f" {mib(memory.total)} free, {held}; {cause}): use more ranks, a smaller image or batch, or free"
            f" memory.{'' if warm else PoolSpent.ENDED}"
        )
    if warm:
        return ModelError(
            f"{sentence.rstrip('.')}. Check what is connected to this node; the workers are ready for the"
            " next run."
        )
    return PoolFailed(f"{sentence.rstrip('.')}. Run again, a fresh pool will be started.")


def told_before(
    death: int, requests: Sequence[SentRequest], facts: Facts
) -> tuple[PipeMeshError, int] | None:
    """Returns the error of the failure that the death of rank ``death`` follows from, and the rank
    that failed; None if no rank had told of one. ``requests``: all in flight.

    Example: rank 0 ran out of memory, and rank 1, which got a message of another evaluation in
    place of the one that it waited for, ended by a signal. A failure inside a message that stayed
    unfinished tells the opposite: the peer was dead already.
    """
    for side in connected(requests):
        failures = first_failures(side)
        causes = {rank: one for rank, one in failures.items() if one.kind != "error" or one.at is not None}
        if causes and any(death in one.group for one in side):
            rank, failure = first_cause(causes)
            return error_of(rank, failure, facts, warm=False), rank
    return None


def first_failures(requests: Sequence[SentRequest]) -> dict[int, Failed]:
    """Returns the first failure that each failed rank reported. ``requests`` are in the order of
    submission.
    """
    return {rank: failure for one in reversed(requests) for rank, failure in one.failures.items()}


def first_cause(failures: Mapping[int, Failed]) -> tuple[int, Failed]:
    """Returns the failure that others may follow from, with its rank: a lack of memory first."""
    last = {"memory": 0, "skipped": 2}
    return min(failures.items(), key=lambda item: (last.get(item[1].kind, 1), item[0]))


def sentence_of_death(where: str, phase: str, status: int | None) -> str:
    """Says why a rank is gone. ``status``: as ``cause_of_end`` takes it."""
    return f"{where} {cause_of_end(status)} while {phase}: {AGAIN}."


def cause_of_end(status: int | None) -> str:
    """Says how a process ended. ``status`` is negative for a signal, and None if the process has
    only closed its connection.
    """
    if status is None:
        return "closed its connection"
    if status == NEVER_STARTED:
        return "could not be forked (why is in ComfyUI's log; with PIPEMESH_FORK=0 workers start without it)"
    if status == SERVER_ENDED:
        return "ended with the process that workers are forked from (why is in ComfyUI's log)"
    if -status in DEADLY:
        return f"was killed (signal {-status}; {DEADLY[signal.Signals(-status)]})"
    return f"ended with {'signal ' + str(-status) if status < 0 else 'exit status ' + str(status)}"


def sentence_of_stall(where: str, phase: str, stall_s: float) -> str:
    ports = (
        "with several machines, see that every port is open between them, or set GLOO_SOCKET_IFNAME to the"
        " interface between them; "
    )
    return (
        f"{where} made no progress for {stall_s:g} s while {phase}: "
        f"{ports if phase == 'joining' else ''}{AGAIN} (PIPEMESH_STALL_S sets the limit)."
    )


def sentence_of_lost_machine(name: str, phase: str, ranks: Mapping[int, str], why: object) -> str:
    """Says that machine ``name`` was lost. ``ranks`` maps its ranks to their devices."""
    named = ", ".join(f"rank {rank} on {device}" for rank, device in ranks.items())
    return (
        f"Machine {name} was lost while {phase} ({named}; {why}): check that it is up, that the network"
        f" reaches it and that torchrun runs there, then {AGAIN}."
    )
