"""Measure a pool of two groups of one rank: the same runs as stock's in turn, the cores' capacity
taken out. ``cfg`` and ``data`` are benches of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .capacity import capacity
from .figures import Figure, Goal, Options, Round, estimate, typical
from .lockstep import Phase, Ranks, merge, run, timed

EFFICIENCY = 0.97  # goal
TOKENS, STEPS = 1024, 3
SHORTER = 16  # tokens by which the negative prompt is shorter than the positive one
BATCH, SCALE = {"cfg": 1, "data": 2}, {"cfg": 4.0, "data": 1.0}  # images, and cfg


def efficiency(rounds: Sequence[Round]) -> float:
    """Time of stock's run over that of the pool's and the cores' capacity."""
    return typical(rounds, "alone") / (typical(rounds, "parallel") * capacity(rounds))


def speedup(rounds: Sequence[Round]) -> float:
    return typical(rounds, "alone") / typical(rounds, "parallel")


class GroupRuns:
    """One process of the bench: the sampler over the stock model, and, in the first process, over
    a pool with two groups along ``axis``.
    """

    def __init__(self, ranks: Ranks, axis: str, comfyui: str):
        from ...launcher.pool.devices import place
        from ...launcher.pool.handle import PoolHandle
        from ...launcher.pool.rank_setup import RankSetup
        from ...parallel_runtime.client.remote_patcher import parallelize
        from ...parallel_runtime.client.remote_pool import RemotePool
        from ...parallel_runtime.layout import Layout
        from .forwards import SAMPLE, SIZE

        self.axis = axis
        self.stock = SAMPLE.form.random_model(SIZE)
        self.all_cores = ranks.all_cores
        self.handle = None
        if ranks.rank == 0:
            setup = RankSetup(comfyui=comfyui, comfy_args={"cpu": True})
            self.handle = PoolHandle(place(Layout(**{axis: 2}), "cpu", "gloo", ()), setup)
            self.parallel = parallelize(
                SAMPLE.form.random_model(SIZE), RemotePool(self.handle, shares_weights=True), 0.0
            )

    def sample(self, model: Any) -> Any:
        from .forwards import TEXT_TOKENS, sampled

        how = {"images": BATCH[self.axis], "cfg": SCALE[self.axis]}
        return sampled(model, TOKENS, STEPS, prompts=(TEXT_TOKENS, TEXT_TOKENS - SHORTER), **how)

    def through(self) -> float:
        """Seconds of a run through the pool; 0 in the processes that have none."""
        from .forwards import on_cores

        if self.handle is None:
            return 0.0
        with on_cores(self.all_cores):
            return timed(lambda: self.sample(self.parallel))


def measure(ranks: Ranks, axis: str, rounds: int, comfyui: str) -> list[Round]:
    runs = GroupRuns(ranks, axis, comfyui)
    try:
        phases = {
            "alone": Phase(lambda: timed(lambda: runs.sample(runs.stock)), alone=True),
            "parallel": Phase(runs.through),
            "both": Phase(lambda: timed(lambda: runs.sample(runs.stock))),
        }
        return ranks.measure(phases, rounds)
    finally:
        if runs.handle is not None:
            runs.handle.close()


def bench_of(axis: str, options: Options) -> Iterator[Figure]:
    rounds = merge(
        run(options.host, 2, "groups:measure", axis=axis, rounds=options.rounds, comfyui=options.host.comfyui)
    )
    case = f"{axis}2_{TOKENS}"
    yield Figure(axis, case, "efficiency", estimate(rounds, efficiency), "ratio", Goal(at_least=EFFICIENCY))
    yield Figure(axis, case, "speedup", estimate(rounds, speedup), "x")
    yield Figure(axis, case, "capacity", estimate(rounds, capacity), "x")
