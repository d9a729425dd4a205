"""Measure sequence parallelism, Ulysses and ring: its efficiency, its plain speed-up, the cost of
sharding itself, and the bytes it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..dry_run.expected import even_bytes
from .capacity import capacity
from .figures import Figure, Goal, Options, Round, estimate, exactly, typical
from .lockstep import Phase, Ranks, merge, run

METHODS = {"ulysses2": (2, 1), "ring2": (1, 2)}  # degrees of ulysses and ring; two ranks have a core each
BYTES_ONLY = {"2x2": (2, 2)}  # four ranks share two cores: no figure of time is worth anything
EFFICIENCY = {1024: 0.88, 4096: 0.95}  # tokens -> goal


def efficiency(rounds: Sequence[Round]) -> float:
    """Time of the same shards in turn, without communication, over the parallel run's time and the
    cores' capacity.
    """
    return typical(rounds, "shards") / (typical(rounds, "parallel") * capacity(rounds))


def speedup(rounds: Sequence[Round]) -> float:
    return typical(rounds, "alone") / typical(rounds, "parallel")


def patch_tax(rounds: Sequence[Round]) -> float:
    return typical(rounds, "shards") / typical(rounds, "alone")


def exchange_share(rounds: Sequence[Round]) -> float:
    """The share of the parallel forward that is spent in messages, waiting for the other rank
    included.
    """
    return typical(rounds, "exchange") / typical(rounds, "parallel")


def measure(ranks: Ranks, tokens: int, rounds: int, degrees: Sequence[int]) -> dict[str, Any]:
    from ...parallel_runtime.comm.cores import giving_way
    from ...parallel_runtime.comm.mesh import connect
    from ...parallel_runtime.layout import Layout
    from .forwards import Forwards, standin

    layout = Layout(ulysses=degrees[0], ring=degrees[1])
    forwards = Forwards(tokens)
    with giving_way():
        comm = connect(layout, ranks.rank, via_cpu=False, wants_stop=lambda: False).sequence
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
    for method, degrees in {**METHODS, **BYTES_ONLY}.items():
        timed = method in METHODS
        for tokens, goal in EFFICIENCY.items() if timed else [(1024, None)]:
            case = f"{method}_{tokens}"
            rounds = options.rounds if timed else 0
            by_rank = run(
                options.host,
                degrees[0] * degrees[1],
                "sp:measure",
                tokens=tokens,
                rounds=rounds,
                degrees=degrees,
            )
            if goal is not None:
                yield from times(case, merge([rank["rounds"] for rank in by_rank]), goal)
            formula = by_rank[0]["formula"]
            sent = max(rank["sent_bytes"] for rank in by_rank)
            yield Figure("sp", case, "bytes_per_step", exactly(sent), "bytes", Goal.within(0.02, formula))
            yield Figure("sp", case, "bytes_formula", exactly(formula), "bytes")


def times(case: str, rounds: Sequence[Round], goal: float) -> Iterator[Figure]:
    yield Figure("sp", case, "efficiency", estimate(rounds, efficiency), "ratio", Goal(at_least=goal))
    yield Figure("sp", case, "speedup", estimate(rounds, speedup), "x")
    yield Figure("sp", case, "patch_tax", estimate(rounds, patch_tax), "ratio")
    yield Figure("sp", case, "exchange_share", estimate(rounds, exchange_share), "ratio")
    yield Figure("sp", case, "capacity", estimate(rounds, capacity), "x")
