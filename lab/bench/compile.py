"""Measure ``torch.compile``: how much of what it gains on stock ComfyUI remains in the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from .figures import CaseFigures, Figure, Goal, Options, Round, estimate, ratio, typical
from .lockstep import Phase, Ranks, merge, run, timed

if TYPE_CHECKING:
    from ...parallel_runtime.families.sample import Size

KEPT = 0.9
GAINS = 1.02  # stock's gain above which there is one to keep
TOKENS = (1024, 4096)
DEGREES = (2, 1)  # of ulysses and ring
stock_gain = ratio("stock", "stock_compiled")  # one process, and the model compiled whole
gain = ratio("ranks", "ranks_compiled")  # two ranks, and their blocks compiled


def kept(rounds: Sequence[Round]) -> float:
    """The seconds that compiling saves all ranks together, over those that it saves stock: both
    compute as much. Messages, which no compiler shortens, are in neither difference.
    """
    saved = typical(rounds, "ranks") - typical(rounds, "ranks_compiled")
    return DEGREES[0] * DEGREES[1] * saved / (typical(rounds, "stock") - typical(rounds, "stock_compiled"))


def of_stock(rounds: Sequence[Round]) -> float:
    """Two ranks' gain over stock's: far below 1 where compiled ranks lose what stock wins."""
    return gain(rounds) / stock_gain(rounds)


def figures(case: str, rounds: Sequence[Round]) -> Iterator[Figure]:
    """Yield both gains, one over the other, and what is kept of stock's seconds where stock saves
    some.
    """
    made, there_is_one = CaseFigures("compile", case, rounds), estimate(rounds, stock_gain).low > GAINS
    yield made.estimated("gain_of_stocks", of_stock, "ratio", Goal(at_least=KEPT))
    if there_is_one:
        yield made.estimated("kept", kept, "ratio", Goal(at_least=KEPT))
    yield made.estimated("gain", gain, "x")
    yield made.estimated("stock_gain" if there_is_one else "stock_gain, none to keep", stock_gain, "x")


def measure(ranks: Ranks, tokens: int, rounds: int) -> list[Round]:
    from ...parallel_runtime.layout import Layout
    from .forwards import SIZE, SMALL

    layout = Layout(ulysses=DEGREES[0], ring=DEGREES[1])
    how = ranks.choose(("inductor", SIZE), ("eager", SMALL))  # the smallest needs no compiler
    with calls(ranks.connect(layout).sequence, tokens, *how) as made:
        return ranks.measure(
            {
                name: Phase(partial(timed, call), alone=name.startswith("stock"))
                for name, call in made.items()
            },
            rounds,
        )


@contextmanager
def calls(comm: Any, tokens: int, backend: str, size: Size) -> Iterator[dict[str, Callable[[], Any]]]:
    """Yield the evaluations to compare, each of a model of its own, as a rank of ``comm`` has
    them.
    """
    import torch

    from ...parallel_runtime.families.plan import COMPILE
    from ...parallel_runtime.methods.compiled_blocks import with_own_guards
    from .forwards import Forwards

    stock, stock_compiled, in_ranks, compiled_ranks = (Forwards(tokens, size) for _ in range(4))
    give_own_code(stock_compiled.model)
    compiled: Any = torch.compile(stock_compiled.model, **with_own_guards(backend=backend))
    compiled_ranks.arguments["transformer_options"] = {
        COMPILE: {"paths": [""], "kwargs": {"backend": backend}}
    }
    with (
        torch.inference_mode(),
        in_ranks.parallel(comm) as evaluate,
        compiled_ranks.parallel(comm) as evaluate_compiled,
    ):
        yield {
            "stock": stock.evaluate,
            "stock_compiled": lambda: compiled(**stock_compiled.arguments),
            "ranks": evaluate,
            "ranks_compiled": evaluate_compiled,
        }


def give_own_code(model: Any) -> None:
    """Have the model's modules compute with copies of their forwards. torch keeps graphs by code:
    else stock's model would compute with those made for blocks of ranks, which call the ranks'
    attention, and each would be made for the lengths of both.
    """
    copies: dict[type, FunctionType] = {}
    for module in model.modules():
        own = type(module).forward
        if type(module) not in copies:
            code = own.__code__.replace(co_name=f"{own.__name__}_of_stock")
            copies[type(module)] = FunctionType(
                code, own.__globals__, own.__name__, own.__defaults__, own.__closure__
            )
            copies[type(module)].__kwdefaults__ = own.__kwdefaults__
        module.forward = MethodType(copies[type(module)], module)


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    for tokens in options.choose(TOKENS, (LEAST_TOKENS,)):
        asked = {"tokens": tokens, "rounds": options.rounds}
        rounds = merge(run(options, DEGREES[0] * DEGREES[1], "compile:measure", **asked))
        yield from figures(f"ulysses2_{tokens}", rounds)
