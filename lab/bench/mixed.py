"""Measure a pair of ranks of which one is half as fast: tokens shared out by their measured speeds,
beside an even split, both held to the ideal for such a pair.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from .capacity import capacity
from .figures import CaseFigures, Figure, Goal, Options, Round, ratio, typical
from .lockstep import Phase, Ranks, merge, run

TOKENS = 2048
DUTY = (1.0, 0.5)  # of its time, in which each rank computes
OF_IDEAL = 1.1  # goal
TRIES = 3  # forwards behind a rank's speed


class DutyCycle:
    """Slows a rank down to ``share`` of its speed. Called at every block and before every message,
    it sleeps as long as a device of that speed would go on with what was computed since.
    """

    def __init__(self, share: float):
        self._owed = 1.0 / share - 1.0
        self._paid_at = time.thread_time()

    def begin(self) -> None:
        self._paid_at = time.thread_time()

    def __call__(self) -> None:
        computed = time.thread_time() - self._paid_at
        if self._owed:
            time.sleep(computed * self._owed)
        self.begin()


def pair(rounds: Sequence[Round]) -> float:
    """How many of the faster rank's device the two are, when they compute all of the time that they
    may: what both cores can do while the slower one computes, one core else.
    """
    both = min(DUTY)
    return both * capacity(rounds) + 1.0 - both


def of_ideal(rounds: Sequence[Round], phase: str = "mixed") -> float:
    """The time of ``phase`` over that of the very same shards on an ideal pair, whose devices
    compute all the time and wait for nothing.
    """
    return typical(rounds, phase) * pair(rounds) / typical(rounds, "shards")


def measure(ranks: Ranks, tokens: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from ...parallel_runtime.comm.cores import giving_way
    from ...parallel_runtime.comm.shares import relative, shares_of
    from ...parallel_runtime.layout import Layout
    from .forwards import SIZE, SMALL, Forwards, standin

    layout, forwards = Layout(ring=len(DUTY)), Forwards(tokens, ranks.choose(SIZE, SMALL))
    slowed = DutyCycle(DUTY[ranks.rank])
    known = torch.zeros(ranks.size, dtype=torch.float64)
    known[ranks.rank] = 1.0 / min(forwards.through(standin(Layout(), 0), slowed) for _ in range(TRIES))
    with giving_way():
        dist.all_reduce(known)
    speeds = relative(known.tolist())
    even, mixed = (ranks.connect(layout, one).sequence for one in ((), speeds))
    standins = [standin(layout, rank, speeds) for rank in range(ranks.size)]
    phases = {
        "alone": Phase(forwards.whole, alone=True),
        "mixed": Phase(lambda: forwards.through(mixed, slowed)),
        "both": Phase(forwards.whole),
        "even": Phase(lambda: forwards.through(even, slowed)),
        "shards": Phase(lambda: sum(forwards.through(one) for one in standins), alone=True),
    }
    shares = shares_of(layout, ranks.rank, speeds).tokens or (1,) * ranks.size
    return {"rounds": ranks.measure(phases, rounds), "slower_share": shares[-1] / sum(shares)}


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    tokens = options.choose(TOKENS, LEAST_TOKENS)
    by_rank = run(options, len(DUTY), "mixed:measure", tokens=tokens, rounds=options.rounds)
    yield from figures(tokens, merge([rank["rounds"] for rank in by_rank]), by_rank[0]["slower_share"])


def figures(tokens: int, rounds: Sequence[Round], slower_share: float) -> Iterator[Figure]:
    made = CaseFigures("mixed", f"ring2_{tokens}", rounds)
    yield made.estimated("of_ideal", of_ideal, "x", Goal(at_most=OF_IDEAL))
    yield made.estimated("even_of_ideal", partial(of_ideal, phase="even"), "x")
    yield made.counted("slower_share", slower_share, "ratio")
    yield made.estimated("speedup", ratio("alone", "mixed"), "x")
    yield made.estimated("capacity", capacity, "x")
