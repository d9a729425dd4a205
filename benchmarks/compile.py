"""Measure ``torch.compile``: how much of what it gains on stock ComfyUI remains in the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .figures import Figure, Goal, Options, Round, estimate, typical
from .lockstep import Phase, Ranks, merge, run

KEPT = 0.9
TOKENS = (1024, 4096)
DEGREES = (2, 1)  # of ulysses and ring


def stock_gain(rounds: Sequence[Round]) -> float:
    """One process: time of the model as it is over that of the model compiled whole."""
    return typical(rounds, "stock") / typical(rounds, "stock_compiled")


def gain(rounds: Sequence[Round]) -> float:
    """Two ranks: time of their blocks as they are over that of compiled ones."""
    return typical(rounds, "ranks") / typical(rounds, "ranks_compiled")


def kept(rounds: Sequence[Round]) -> float:
    return gain(rounds) / stock_gain(rounds)


def measure(ranks: Ranks, tokens: int, rounds: int) -> list[Round]:
    import torch

    from ..parallel_runtime.comm.cores import giving_way
    from ..parallel_runtime.comm.mesh import connect
    from ..parallel_runtime.families.plan import COMPILE
    from ..parallel_runtime.layout import Layout
    from ..parallel_runtime.methods.compiled import with_own_guards
    from .forwards import Forwards
    from .lockstep import timed

    layout = Layout(ulysses=DEGREES[0], ring=DEGREES[1])
    with giving_way():
        comm = connect(layout.degrees(), ranks.rank, device_type="cpu", via_cpu=False, wants_stop=lambda: False).sequence
    forwards = Forwards(tokens)
    compiled: Any = torch.compile(forwards.model, **with_own_guards(backend="inductor"))
    in_ranks, compiled_ranks = Forwards(tokens), Forwards(tokens)
    compiled_ranks.arguments["transformer_options"] = {COMPILE: {"paths": [""], "kwargs": {"backend": "inductor"}}}
    with torch.inference_mode(), in_ranks.parallel(comm) as evaluate, compiled_ranks.parallel(comm) as evaluate_compiled:
        return ranks.measure(
            {
                "stock": Phase(forwards.whole, alone=True),
                "stock_compiled": Phase(lambda: timed(lambda: compiled(**forwards.arguments)), alone=True),
                "ranks": Phase(lambda: timed(evaluate)),
                "ranks_compiled": Phase(lambda: timed(evaluate_compiled)),
            },
            rounds,
        )


def bench(options: Options) -> Iterator[Figure]:
    for tokens in TOKENS:
        rounds = merge(run(options.host, DEGREES[0] * DEGREES[1], "compile:measure", tokens=tokens, rounds=options.rounds))
        case = f"ulysses2_{tokens}"
        yield Figure("compile", case, "kept", estimate(rounds, kept), "ratio", Goal(at_least=KEPT))
        yield Figure("compile", case, "gain", estimate(rounds, gain), "x")
        yield Figure("compile", case, "stock_gain", estimate(rounds, stock_gain), "x")
