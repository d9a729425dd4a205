"""Measure sequence parallelism, Ulysses and ring: its efficiency, its plain speed-up, the cost of
sharding itself, and the bytes it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..dry_run.expected import even_bytes
from .capacity import capacity, speedup
from .figures import CaseFigures, Figure, Goal, Options, Round, ratio, typical
from .lockstep import Phase, Ranks, merge, run

METHODS = {"ulysses2": (2, 1), "ring2": (1, 2)}  # degrees of ulysses and ring; two ranks have a core each
BYTES_ONLY = {"2x2": (2, 2)}  # four ranks share two cores: no figure of time is worth anything
EFFICIENCY = {1024: 0.88, 4096: 0.95}  # tokens -> goal
patch_tax = ratio("shards", "alone")
# Of the parallel forward, what is spent in messages, waiting for the other rank included
exchange_share = ratio("exchange", "parallel")


def efficiency(rounds: Sequence[Round]) -> float:
    """Time of the same shards in turn, without communication, over the parallel run's time and the
    cores' capacity.
    """
    return typical(rounds, "shards") / (typical(rounds, "parallel") * capacity(rounds))


def measure(ranks: Ranks, tokens: int, rounds: int, degrees: Sequence[int]) -> dict[str, Any]:
    from ...parallel_runtime.layout import Layout
    from .forwards import SIZE, SMALL, Forwards, standin

    layout = Layout(ulysses=degrees[0], ring=degrees[1])
    forwards = Forwards(tokens, ranks.choose(SIZE, SMALL))
    comm = ranks.connect(layout).sequence
    standins = [standin(layout, rank) for rank in range(ranks.size)]
    exchanges: list[float] = []

    def parallel() -> float:
        seconds = forwards.through(comm)
        exchanges.append(sum(comm.traffic.waited_s.values()))
        return seconds

    phases = {
        "alone": Phase(forwards.whole, alone=True),
        "parallel": Phase(parallel),
        "both": Phase(forwards.whole),
        "shards": Phase(lambda: sum(forwards.through(one) for one in standins), alone=True),
    }
    formula = even_bytes(layout, tokens, forwards.hidden, forwards.blocks, 4)
    measured = ranks.measure(phases, rounds) if rounds else [{"parallel": parallel()}]
    measured = [
        {**round_, "exchange": seconds}
        for round_, seconds in zip(measured, exchanges[-len(measured) :], strict=True)
    ]
    return {"rounds": measured, "sent_bytes": comm.traffic.sent_bytes.total(), "formula": formula}


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    goals = options.choose(EFFICIENCY, {LEAST_TOKENS: 0.0})
    for method, degrees in {**METHODS, **BYTES_ONLY}.items():
        timed = method in METHODS
        for tokens, goal in goals.items() if timed else [(min(goals), None)]:
            asked = {"tokens": tokens, "rounds": options.rounds if timed else 0, "degrees": degrees}
            by_rank = run(options, degrees[0] * degrees[1], "sp:measure", **asked)
            made = CaseFigures("sp", f"{method}_{tokens}", merge([rank["rounds"] for rank in by_rank]))
            if goal is not None:
                yield from times(made, goal)
            formula = by_rank[0]["formula"]
            sent = max(rank["sent_bytes"] for rank in by_rank)
            yield made.counted("bytes_per_step", sent, "bytes", Goal.within(0.02, formula))
            yield made.counted("bytes_formula", formula, "bytes")


def times(made: CaseFigures, goal: float) -> Iterator[Figure]:
    yield made.estimated("efficiency", efficiency, "ratio", Goal(at_least=goal))
    yield made.estimated("speedup", speedup, "x")
    yield made.estimated("patch_tax", patch_tax, "ratio")
    yield made.estimated("exchange_share", exchange_share, "ratio")
    yield made.estimated("capacity", capacity, "x")
