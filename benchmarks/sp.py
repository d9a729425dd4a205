"""Sequence parallelism on two ranks: its efficiency, its plain speed-up, what sharding itself costs, and the bytes it sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .capacity import capacity
from .figures import Figure, Goal, Options, Round, estimate, exactly, typical
from .lockstep import Phase, Ranks, merge, run

RANKS = 2
EFFICIENCY = {1024: 0.88, 4096: 0.95}  # tokens -> goal


def efficiency(rounds: Sequence[Round]) -> float:
    """The same shards in turn, without communication, against the parallel run and what the cores can give."""
    return typical(rounds, "shards") / (typical(rounds, "parallel") * capacity(rounds))


def speedup(rounds: Sequence[Round]) -> float:
    return typical(rounds, "alone") / typical(rounds, "parallel")


def patch_tax(rounds: Sequence[Round]) -> float:
    return typical(rounds, "shards") / typical(rounds, "alone")


def ulysses_bytes(ranks: int, tokens: int, hidden: int, blocks: int, item_bytes: int, batch: int = 1) -> float:
    """Sent by one rank in one evaluation: three quarters of it q, k and v, the rest attention's output."""
    return 4 * (ranks - 1) / ranks**2 * batch * tokens * hidden * blocks * item_bytes


def measure(ranks: Ranks, tokens: int, rounds: int) -> dict[str, Any]:
    from ..parallel_runtime.comm.exchange import Exchange
    from .forwards import Forwards, Standin

    forwards = Forwards(tokens)
    exchange = Exchange(None, ranks.rank, ranks.size, on_host=False, wants_stop=lambda: False)
    standins = [Standin(rank, ranks.size) for rank in range(ranks.size)]
    phases = {
        "alone": Phase(forwards.whole, alone=True),
        "parallel": Phase(lambda: forwards.through(exchange)),
        "both": Phase(forwards.whole),
        "shards": Phase(lambda: sum(forwards.through(standin) for standin in standins), alone=True),
    }
    formula = ulysses_bytes(ranks.size, tokens, forwards.hidden, forwards.blocks, 4)
    return {"rounds": ranks.measure(phases, rounds), "sent_bytes": exchange.sent_bytes, "formula": formula}


def bench(options: Options) -> Iterator[Figure]:
    for tokens, goal in EFFICIENCY.items():
        case = f"ulysses{RANKS}_{tokens}"
        by_rank = run(options.host, RANKS, "sp:measure", tokens=tokens, rounds=options.rounds)
        rounds = merge([rank["rounds"] for rank in by_rank])
        yield Figure("sp", case, "efficiency", estimate(rounds, efficiency), "ratio", Goal(at_least=goal))
        yield Figure("sp", case, "speedup", estimate(rounds, speedup), "x")
        yield Figure("sp", case, "patch_tax", estimate(rounds, patch_tax), "ratio")
        yield Figure("sp", case, "capacity", estimate(rounds, capacity), "x")
        formula = by_rank[0]["formula"]
        sent = max(rank["sent_bytes"] for rank in by_rank)
        yield Figure("sp", case, "bytes_per_step", exactly(sent), "bytes", Goal.within(0.02, formula))
        yield Figure("sp", case, "bytes_formula", exactly(formula), "bytes")
