"""Two groups at work on evaluations of their own, played with fake ranks: one that dies, runs out
of memory or is cancelled, and what becomes of the other.
"""

from __future__ import annotations

import pytest
from pipemesh.launcher.pool.devices import place
from pipemesh.parallel_runtime.errors import OutOfMemory, PoolFailed, RunCancelled
from pipemesh.parallel_runtime.layout import Layout

from .fake_pools import assert_over, gate, handled, inside, submitted

TWO = place(Layout(ulysses=2, cfg=2), "cpu", "gloo", ())
GROUPS = [Layout(ulysses=2, cfg=2).members(group) for group in (0, 1)]


def at_work(pool, *rules):
    return [submitted(pool, group=group, rules=rule) for group, rule in zip(GROUPS, rules, strict=True)]


@pytest.mark.parametrize("collected", [0, 1])
def test_a_rank_that_dies_ends_the_pool_whichever_group_is_awaited(started, collected):
    pool = started(TWO)
    pids = pool.ranks.pids
    numbers = at_work(pool, "*:Forward=gated", "2:Forward=gated 3:Forward=slow-then-die")
    with pytest.raises(PoolFailed, match=r"^Rank 3 on cpu .*computing"):
        pool.collect(numbers[collected])
    assert_over(pool, pids)


def test_a_group_without_memory_says_so_while_the_other_ends_and_the_pool_goes_on(started):
    pool = started(TWO)
    other, failing = at_work(pool, "*:Forward=gated", "*:Forward=memory")
    with pytest.raises(OutOfMemory, match=r"^Rank 2 on cpu ran out of memory while computing"):
        pool.collect(failing)
    gate(pool).fill_(1)
    assert sorted(pool.collect(other)) == [0, 1]
    assert handled(pool) == ["Start Forward Release"] * 4


def test_one_stop_calls_both_groups_back_and_the_pool_stays(started):
    pool = started(TWO)
    first, _second = at_work(pool, "*:Forward=cancellable", "*:Forward=cancellable")
    pids = pool.ranks.pids
    with pytest.raises(RunCancelled):  # within the wait for ranks to leave
        if any(answer.cancelled for answer in pool.collect(first, inside(pool, "computing")).values()):
            raise RunCancelled("as the client does")
    pool.abandon()
    assert handled(pool) == ["Start Forward Release"] * 4
    assert pool.ranks.pids == pids
