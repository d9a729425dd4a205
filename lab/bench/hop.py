"""Measure the cost of an evaluation beside the model: the UI's time around an evaluation whose
model takes no time.

The pool, the client's side and the arena are the product's own, on two local ranks; only the ranks'
model can be told to return its latent at once. ``back_to_back`` times such evaluations one after
another. ``between_forwards`` times each after a real forward, as in a run: with cold caches, ranks
that have just computed and a UI that has just slept. ``memory_only`` times, in one process, the
copies of the latent that an evaluation cannot do without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ...parallel_runtime.families.every import sample_with
from ...parallel_runtime.layout import Layout
from .figures import CaseFigures, Figure, Goal, Options, percentile
from .hop_rank import COSTS_NOTHING
from .lockstep import timed
from .pools import cpu_pool

RANKS = 2
LATENT = (1, 16, 128, 128)  # fp32: 1 MiB
WORK_LATENT = (1, 16, 32, 32)  # of the real forwards, small enough for many of them
SAMPLE, SIZE = sample_with("deep")  # as many blocks as in released models: a cost per module shows
TEXT = (1, 512, SIZE.text_dim)  # fp32: 8 MiB
GOALS_MS = {"back_to_back": 1.0, "between_forwards": 2.0}
PER_ROUND = {"back_to_back": 20, "between_forwards": 8}
WARM_UP = 20
COPIES = 4  # of the latent: into the arena, out of it, and the output's the same way back


class Hops:
    """A running pool of two ranks, and evaluations through it."""

    def __init__(self, options: Options):
        import torch
        from comfy.conds import CONDCrossAttn, CONDRegular

        from ...parallel_runtime.client.remote_patcher import parallelize
        from ...parallel_runtime.client.remote_pool import RemotePool
        from ...parallel_runtime.crossing.source import state_source

        argv = (sys.executable, str(Path(__file__).with_name("hop_rank.py")), "{fd}", "{parent}")
        self.handle = cpu_pool(Layout(ulysses=RANKS), options.host.comfyui, argv=argv)
        self._remote = RemotePool(self.handle, shares_weights=True)
        stock = SAMPLE.form.random_model(SIZE)
        # The pool holds the model for as long as this lives
        self._patcher = parallelize(stock, self._remote, holds_ui_device=False)
        self._model = self._patcher.remote.source.model
        self._remote.residency.load(
            self._patcher.remote.source, lambda: state_source(self._patcher), lambda: False
        )
        self._run = self._remote.runs.begin(self._model)
        # The sampler's arithmetic is on a GPU as a rule; here its waiting threads would spin on the
        # ranks' cores
        torch.set_num_threads(1)
        self._generator = torch.Generator().manual_seed(0)
        self._text = torch.randn(TEXT, generator=self._generator)
        self._pooled = torch.randn(1, SIZE.pooled_dim, generator=self._generator)
        made_of = {"c_crossattn": CONDCrossAttn(self._text), "y": CONDRegular(self._pooled)}
        self._cond = [[{"uuid": "cond", "model_conds": made_of}]]

    def evaluate(self, costs_nothing: bool) -> float:
        """Time one evaluation in the UI, in seconds. As under ComfyUI every tensor is a new one,
        and the conditioning is made of the cond's own.
        """
        import torch

        from ...parallel_runtime.client.branch import Branch, origins_by_cond
        from ...parallel_runtime.client.evaluations import Work

        arguments = {
            "x": torch.randn(LATENT if costs_nothing else WORK_LATENT, generator=self._generator),
            "timestep": torch.rand(1, generator=self._generator),
            "context": self._text.clone(),
            "y": self._pooled.clone(),
            "transformer_options": {COSTS_NOTHING: True} if costs_nothing else {},
        }

        def dispatch() -> None:
            branch = Branch(("cond 0",), origins=tuple(origins_by_cond(self._cond).values()))
            self._remote.evaluations.dispatch(self._run, [Work(arguments, branch)], lambda: False)

        with torch.inference_mode():
            return timed(dispatch)

    def milliseconds(self, count: int, between_forwards: bool) -> list[float]:
        hops = []
        for _ in range(WARM_UP + count):
            if between_forwards:
                self.evaluate(costs_nothing=False)
            hops.append(1e3 * self.evaluate(costs_nothing=True))
        return hops[WARM_UP:]

    def memory_only(self, count: int) -> list[float]:
        """Time the copying of the latent alone, in milliseconds."""
        import torch

        here, there = torch.randn(2, *LATENT, generator=self._generator)

        def all_of_it() -> None:
            for _ in range(COPIES):
                there.copy_(here)

        return [1e3 * timed(all_of_it) for _ in range(WARM_UP + count)][WARM_UP:]


def bench(options: Options) -> Iterator[Figure]:
    hops, p50, p99 = Hops(options), partial(percentile, share=0.50), partial(percentile, share=0.99)
    try:
        for case, goal in GOALS_MS.items():
            measured = hops.milliseconds(PER_ROUND[case] * options.rounds, case == "between_forwards")
            made = CaseFigures("hop", case, measured)
            yield made.estimated("hop_ms_p50", p50, "ms", Goal(at_most=goal))
            yield made.estimated("hop_ms_p99", p99, "ms")
        alone = hops.memory_only(PER_ROUND["back_to_back"] * options.rounds)
        yield CaseFigures("hop", "memory_only", alone).estimated("hop_ms_p50", p50, "ms")
    finally:
        hops.handle.close()
