"""Compare PipeMesh with diffusers' own context parallel: the same model, weights and inputs, in the
same rounds of the same processes.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...parallel_runtime.errors import PipeMeshError
from .figures import Figure, Goal, Options, Round, estimate, exactly, typical
from .lockstep import Phase, Ranks, merge, run, timed

if TYPE_CHECKING:
    pass

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


def ratio(ours: str, theirs: str) -> Callable[[Sequence[Round]], float]:
    return lambda rounds: typical(rounds, ours) / typical(rounds, theirs)


def attend_with_sdpa() -> None:
    """Let ComfyUI attend as it does on GPUs, and as diffusers does everywhere: on a CPU it would
    choose a slower way. Call it before any model is built.
    """
    import comfy.cli_args

    comfy.cli_args.args.use_pytorch_cross_attention = True
    import comfy.model_management

    assert comfy.model_management.pytorch_attention_enabled()


def measure(ranks: Ranks, tokens: int, rounds: int) -> dict[str, Any]:
    attend_with_sdpa()
    from ...launcher.trial.rounding import relative_error
    from ...parallel_runtime.comm.cores import giving_way, keep_to
    from ...parallel_runtime.comm.mesh import connect
    from ...parallel_runtime.layout import Layout
    from .diffusers_peer import DiffusersPeer
    from .forwards import Forwards

    forwards = Forwards(tokens)
    peer, parallel_peer, placed_peer = (DiffusersPeer(forwards.model, forwards.arguments) for _ in range(3))
    parallel_peer.parallelize(ranks.size)
    with giving_way():
        comm = connect(
            Layout(ulysses=ranks.size),
            ranks.rank,
            via_cpu=False,
            wants_stop=lambda: False,
        ).sequence
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
    require_diffusers()
    for tokens in TOKENS:
        case = f"ulysses{ULYSSES}_{tokens}"
        by_rank = run(options.host, ULYSSES, "peers:measure", tokens=tokens, rounds=options.rounds)
        rounds = merge([rank["rounds"] for rank in by_rank])
        yield Figure(
            "peers",
            case,
            "time_ratio",
            estimate(rounds, ratio("ours", "theirs")),
            "ratio",
            Goal(at_most=0.95),
        )
        yield Figure(
            "peers", case, "placed_time_ratio", estimate(rounds, ratio("ours", "theirs_placed")), "ratio"
        )
        yield Figure(
            "peers", case, "serial_time_ratio", estimate(rounds, ratio("ours_alone", "theirs_alone")), "ratio"
        )
        yield Figure("peers", case, "speedup", estimate(rounds, ratio("ours_alone", "ours")), "x")
        yield Figure("peers", case, "their_speedup", estimate(rounds, ratio("theirs_alone", "theirs")), "x")
        for metric in ("max_difference", "serial_difference"):
            yield Figure("peers", case, metric, exactly(by_rank[0][metric]), "ratio", Goal(at_most=2e-5))
