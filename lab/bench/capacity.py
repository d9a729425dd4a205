"""Measure the capacity of two cores: two independent forwards at once against one alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .figures import CaseFigures, Figure, Options, Round, ratio, typical
from .lockstep import Phase, Ranks, merge, run

TOKENS = (1024, 4096)
speedup = ratio("alone", "parallel")


def capacity(rounds: Sequence[Round]) -> float:
    return 2 * typical(rounds, "alone") / typical(rounds, "both")


def measure(ranks: Ranks, tokens: int, rounds: int) -> list[Round]:
    from .forwards import SIZE, SMALL, Forwards

    forwards = Forwards(tokens, ranks.choose(SIZE, SMALL))
    return ranks.measure({"alone": Phase(forwards.whole, alone=True), "both": Phase(forwards.whole)}, rounds)


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    for tokens in options.choose(TOKENS, (LEAST_TOKENS,)):
        rounds = merge(run(options, 2, "capacity:measure", tokens=tokens, rounds=options.rounds))
        yield CaseFigures("capacity", f"two_forwards_{tokens}", rounds).estimated("capacity", capacity, "x")
