"""Whatever is asked of a pool, in whatever order, and whatever its ranks do: it says so in one
sentence, never stays busy, leaves nothing behind, and the next one works.

Random sequences over fake ranks. A rank's deed rides in the request's model name. What an act needs
is asked inside it: how a race ends may not change what hypothesis draws.
"""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from pipemesh.parallel_runtime.errors import (
    ModelError,
    OutOfMemory,
    PipeMeshError,
    PoolFailed,
    PoolSpent,
    Refused,
    RunCancelled,
)
from pipemesh.pool import conversation, verdict
from pipemesh.pool.handle import PoolHandle
from pipemesh.pool.pool import WorkerPool

from ..fixtures import ALL
from ..kit.fake_pools import DEADLINE_S, cpus, fake_setup, gate, handled, is_alive, opens, stages, submitted
from ..kit.holdings import NOTHING, Holdings

OVER = (PoolFailed, PoolSpent)
REJECTS = {"refuse": Refused, "error": ModelError, "memory": OutOfMemory}
FATAL = ("die", "garbage", "hang")
DEEDS = (*["answer"] * 4, *["gated"] * 2, "cancellable", *REJECTS, *FATAL)
GROUPS = ((0, 1), (0, 1), (0, 1), (0,), (1,))
KINDS = ("Load", "Forward", "Forward", "Forward", "Release")
THEN = ("collect", "collect", "cancel", "")
OTHER_ACTS = (
    "ensure",
    "ensure",
    "settle",
    "settle",
    "abandon",
    "kill",
    "close",
    "submit_what_no_message_takes",
)
MOST_ON_THEIR_WAY = 4
any_of = st.sampled_from
STALL_S = 15.0  # only reached where a test fails


class Sent(NamedTuple):
    """A request on its way, and what each rank of its group does with it."""

    number: int
    kind: str
    deeds: dict[int, str]

    def does(self, *deeds: str) -> bool:
        return any(deed in deeds for deed in self.deeds.values())


@contextmanager
def limits(pool: WorkerPool, hangs: bool):
    """Slow ranks are soon left alone. Hung ones are soon found out, but only where there are any: a
    healthy rank may be slow on a busy machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "CANCEL_WAIT_S", 0.2)
        if hangs:
            patch.setattr(pool._conversation, "stall_s", 0.3)
            patch.setattr(verdict, "LEAVE_WAIT_S", 0.3)
            patch.setattr(verdict, "OTHERS_WAIT_S", 0.3)
        yield


def one_sentence(error: Exception) -> bool:
    first, _, _lines = str(error).partition("\nLast lines of rank ")
    return "\n" not in first and first[0].isupper() and first.endswith(".")


class Sequences(RuleBasedStateMachine):
    """What a pool may answer is written beside each act; what it must never do, in the
    invariants.
    """

    placement = cpus(2)

    def __init__(self):
        super().__init__()
        self.before = Holdings.now()
        self.handle = PoolHandle(self.placement, fake_setup(stall_s=STALL_S))
        self.pool = self.handle.ensure()
        self.pids = self.pool.ranks.pids
        self.on_its_way: list[Sent] = []  # to be collected
        self.left: list[Sent] = []  # cancelled, and maybe not answered yet

    @property
    def waiting(self) -> list[Sent]:
        return [*self.on_its_way, *self.left]

    def any_does(self, *deeds: str) -> bool:
        return any(sent.does(*deeds) for sent in self.waiting)

    def attempt(self, act) -> tuple[object, Exception | None]:
        """What it returns, and the error it raises, which is one sentence."""
        with limits(self.pool, self.any_does("hang")):
            try:
                return act(), None
            except (Refused, ModelError, PoolFailed, RunCancelled) as error:
                assert one_sentence(error), error
                if isinstance(error, OVER):
                    assert self.is_over
                return None, error

    @property
    def is_over(self) -> bool:
        return self.pool.state in ("failed", "closed")

    # -- acts

    @rule(act=any_of(OTHER_ACTS))
    def do(self, act):
        getattr(self, act)()

    def ensure(self):
        """As at the start of a run: the live pool once nothing is outstanding, or a fresh one."""
        if self.on_its_way:
            return
        is_kept = (
            self.pool.state == "ready" and not self.any_does(*FATAL, *REJECTS) and not self.has_lost_a_rank()
        )
        self.settle()
        pool, error = self.attempt(self.handle.ensure)
        assert error is None and pool.state == "ready"
        assert pool is self.pool or not is_kept
        self.pool, self.pids = pool, pool.ranks.pids
        self.left.clear()
        gate(pool).fill_(0)

    @rule(
        kind=any_of(KINDS),
        group=any_of(GROUPS),
        deeds=st.tuples(any_of(DEEDS), any_of(DEEDS)),
        then=any_of(THEN),
    )
    def submit(self, kind, group, deeds, then):
        if self.is_over and then:
            self.ensure()
        if len(self.on_its_way) < MOST_ON_THEIR_WAY:
            self.send(kind, group, deeds)
        if then:
            getattr(self, then)(-1)

    def send(self, kind, group, deeds):
        if kind != "Forward":  # which alone is left early
            deeds = ["gated" if deed == "cancellable" else deed for deed in deeds]
        deeds = {rank: deeds[rank] for rank in group}
        rules = " ".join(f"{rank}:*={deed}" for rank, deed in deeds.items())
        was = self.pool.state
        number, error = self.attempt(lambda: submitted(self.pool, kind, group, rules))
        if error is None:
            assert was in ("ready", "busy")
            self.on_its_way.append(Sent(number, kind, deeds))
        else:
            assert isinstance(error, OVER)
            assert was in ("failed", "closed") or self.any_does(*FATAL) or self.has_lost_a_rank()
            self.ended()

    def submit_what_no_message_takes(self):
        """The ranks hear nothing of it."""
        before = self.pool.state
        if self.is_over or self.any_does(*FATAL) or self.has_lost_a_rank():
            return
        for kind in ("unwritable Load", "unwritable Forward"):
            with pytest.raises((OverflowError, PipeMeshError)):
                submitted(self.pool, kind)
            assert self.pool.state == before

    @rule(index=st.integers(0, MOST_ON_THEIR_WAY - 1))
    def collect(self, index):
        """But not while a rank waits to be told to leave."""
        if not self.on_its_way or self.any_does("cancellable"):
            return
        sent = self.on_its_way[index % len(self.on_its_way)]
        replies, error = self.attempt(lambda: self.pool.collect(sent.number, opens(self.pool)))
        expected = self.expected_of(sent)
        assert type(error) in expected, (error, expected)
        if error is None:
            assert list(replies) == sorted(sent.deeds)
            assert all(reply.output.decode().endswith(sent.kind) for reply in replies.values())
            self.on_its_way.remove(sent)
        else:
            self.rejected(sent, error)

    def rejected(self, sent: Sent, error: Exception) -> None:
        """Then the others are to be abandoned."""
        if isinstance(error, OVER):
            self.ended()
            return
        self.on_its_way.remove(sent)
        self.left.append(sent)
        if self.on_its_way:
            self.abandon()

    def expected_of(self, sent: Sent) -> set[type]:
        """Exact where nothing else is in flight."""
        rejects = {REJECTS[deed] for one in self.waiting for deed in one.deeds.values() if deed in REJECTS}
        over = {PoolFailed, *([PoolSpent] if OutOfMemory in rejects else [])}
        if self.has_lost_a_rank() or (self.any_does(*FATAL) and self.waiting == [sent]):
            return {*over, *(rejects if self.has_lost_a_rank() else ())}
        if self.any_does(*FATAL):
            return {*over, type(None), *rejects}
        if self.waiting != [sent]:
            return {type(None), *rejects, *(over if rejects else ())}
        return rejects or {type(None)}  # ranks reject in step with the others

    @rule(index=st.integers(0, MOST_ON_THEIR_WAY - 1))
    def cancel(self, index):
        """As Stop does."""
        if not self.on_its_way:
            return
        sent = self.on_its_way[index % len(self.on_its_way)]
        _, error = self.attempt(lambda: self.pool.collect(sent.number, lambda: True))
        if error is None:  # it had been answered
            self.on_its_way.remove(sent)
            return
        assert isinstance(error, RunCancelled) or self.any_does(*FATAL, *REJECTS) or self.has_lost_a_rank()
        if self.is_over:  # for slow as it was, it may have counted as hung
            self.ended()
        else:
            self.rejected(sent, error)

    def abandon(self):
        _, error = self.attempt(self.pool.abandon)
        assert error is None
        self.left += self.on_its_way
        self.on_its_way.clear()
        if self.is_over:
            self.ended()

    def settle(self):
        if self.on_its_way or self.pool.state != "ready":
            return
        asked, opened = [], opens(self.pool)
        has_to_wait = self.any_does("gated") and not gate(self.pool).item()
        _, error = self.attempt(lambda: self.pool.settle(lambda: asked.append(True) or opened()))
        if error is None:
            assert asked or not has_to_wait, "an answer is outstanding"
            self.left.clear()
        else:
            assert isinstance(error, OVER)
            assert self.any_does(*FATAL, *REJECTS) or self.has_lost_a_rank()
            self.ended()

    def kill(self):
        """While it is idle: the next run must not hear of it."""
        if self.waiting or self.pool.state != "ready" or self.has_lost_a_rank():
            return
        process = psutil.Process(self.pids[1])
        process.kill()
        assert self.pool.ranks._crew.supervisor.exit_of(1, DEADLINE_S) == -9
        assert self.handle.live() is None

    def close(self):
        self.pool.close()
        self.ended()

    def ended(self) -> None:
        self.on_its_way.clear()
        self.left.clear()

    def has_lost_a_rank(self) -> bool:
        return not all(map(is_alive, self.pids))

    # -- what always holds

    @invariant()
    def busy_is_who_has_something_on_its_way(self):
        assert self.pool.state != "busy" or self.on_its_way

    @invariant()
    def a_pool_that_is_over_holds_nothing(self):
        if self.is_over:
            assert not any(map(is_alive, self.pids))
            assert self.pool.arena.segment.fd == -1

    def teardown(self):
        try:
            self.abandon()
            self.ensure()
            assert [said.split()[-1] for said in handled(self.pool)] == ["Release"] * 2
        finally:
            self.handle.close()
        if sys.exc_info()[0] is None:  # else the error's own frames hold what they were at
            assert Holdings.now().since(self.before) == NOTHING


class StageSequences(Sequences):
    placement = stages(2)


@pytest.fixture(autouse=True)
def frozen(monkeypatch):
    """What was there before is not looked at by each of many collections; and no log keeps errors,
    whose frames hold pools.
    """
    monkeypatch.setattr(logging.getLogger("pipemesh"), "disabled", True)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("machine", [Sequences, StageSequences], ids=["lockstep", "stages"])
def test_any_sequence_of_acts_and_failures_leaves_a_pool_that_works_or_nothing_at_all(machine):
    """What it found is made shorter only where there is time for it."""
    phases = set(Phase) - (set() if ALL else {Phase.shrink, Phase.explain})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150 if ALL else 6,
            stateful_step_count=20,
            phases=phases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
