"""Compare PipeMesh with diffusers' own context parallel: the same model, weights and inputs, in the
same rounds of the same processes.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from ...parallel_runtime.errors import PipeMeshError
from .figures import CaseFigures, Figure, Goal, Options, ratio
from .lockstep import Phase, Ranks, attend_with_sdpa, merge, run, timed

DIFFUSERS = "diffusers>=0.42,<0.43"  # pyproject's extra `peers`
TOKENS = (1024, 4096)
ULYSSES = 2


def require_diffusers() -> None:
    try:
        version = importlib.metadata.version("diffusers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith("0.42."):
        command = shlex.join([sys.executable, "-m", "pip", "install", DIFFUSERS])
        raise PipeMeshError(
            f"The peers bench compares with diffusers 0.42 and this python has {version}: run {command}"
        )


def measure(ranks: Ranks, tokens: int, rounds: int) -> dict[str, Any]:
    attend_with_sdpa()
    from ...parallel_runtime.comm.cores import giving_way, keep_to
    from ...parallel_runtime.layout import Layout
    from ...pool.trial.rounding import relative_error
    from .diffusers_peer import DiffusersPeer
    from .forwards import SIZE, SMALL, Forwards

    forwards = Forwards(tokens, ranks.choose(SIZE, SMALL))
    peer, parallel_peer, placed_peer = (DiffusersPeer(forwards.model, forwards.arguments) for _ in range(3))
    parallel_peer.parallelize(ranks.size)
    comm = ranks.connect(Layout(ulysses=ranks.size)).sequence
    with giving_way():
        placed_peer.parallelize(ranks.size)

    def theirs() -> float:
        """Run the peer as it comes, with its threads where the scheduler puts them."""
        keep_to(ranks.all_cores)
        try:
            return timed(parallel_peer.evaluate)
        finally:
            keep_to(ranks.own_cores)

    phases = {
        "ours": Phase(lambda: forwards.through(comm)),
        "theirs": Phase(theirs),
        "theirs_placed": Phase(lambda: timed(placed_peer.evaluate)),
        "ours_alone": Phase(forwards.whole, alone=True),
        "theirs_alone": Phase(lambda: timed(peer.evaluate), alone=True),
    }
    measured = ranks.measure(phases, rounds)
    with forwards.parallel(comm) as evaluate:
        ours, _ = forwards.model.process_img(evaluate())
    ours_alone, _ = forwards.model.process_img(forwards.evaluate())
    return {
        "rounds": measured,
        "max_difference": relative_error(ours, parallel_peer.evaluate()),
        "serial_difference": relative_error(ours_alone, peer.evaluate()),
    }


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    require_diffusers()
    for tokens in options.choose(TOKENS, (LEAST_TOKENS,)):
        by_rank = run(options, ULYSSES, "peers:measure", tokens=tokens, rounds=options.rounds)
        rounds = merge([rank["rounds"] for rank in by_rank])
        made = CaseFigures("peers", f"ulysses{ULYSSES}_{tokens}", rounds)
        yield made.estimated("time_ratio", ratio("ours", "theirs"), "ratio", Goal(at_most=0.95))
        yield made.estimated("placed_time_ratio", ratio("ours", "theirs_placed"), "ratio")
        yield made.estimated("serial_time_ratio", ratio("ours_alone", "theirs_alone"), "ratio")
        yield made.estimated("speedup", ratio("ours_alone", "ours"), "x")
        yield made.estimated("their_speedup", ratio("theirs_alone", "theirs"), "x")
        for metric in ("max_difference", "serial_difference"):
            yield made.counted(metric, by_rank[0][metric], "ratio", Goal(at_most=2e-5))
