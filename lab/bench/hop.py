"""Measure the cost of an evaluation beside the model: the UI's time around an evaluation whose
model takes no time.

The pool, the client's side and the arena are the product's own, on two local ranks; only the ranks'
model can be told to return its latent at once. ``back_to_back`` times such evaluations one after
another. ``between_forwards`` times each after a real forward, as in a run: with cold caches, ranks
that have just computed and a UI that has just slept. ``memory_only`` times, in one process, the
copies of the latent that an evaluation cannot do without.

``in_bare`` is a hop over what any evaluation would take on this machine, in the same rounds: a word
to as many processes as there are ranks, each of which answers by another, and those copies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.layout import Layout
from .figures import CaseFigures, Figure, Goal, Options, percentile, ratio
from .hop_rank import COSTS_NOTHING
from .lockstep import timed
from .pools import cpu_pool

RANKS = 2
LATENT = (1, 16, 128, 128)  # fp32: 1 MiB
WORK_LATENT = (1, 16, 32, 32)  # of the real forwards, small enough for many of them
SAMPLE, SIZE = sample_with("deep")  # as many blocks as in released models: a cost per module shows
TEXT = (1, 512, SIZE.text_dim)  # fp32: 8 MiB
GOALS = {"back_to_back": 8.0, "between_forwards": 10.0}  # in_bare
PER_ROUND = {"back_to_back": 20, "between_forwards": 8}
LEAST = replace(SIZE, blocks=(1, 1))
WARM_UP = 20
ECHO = "import os\nwhile word := os.read(0, 64): os.write(1, word)"
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
        self.handle = cpu_pool(options, Layout(ulysses=RANKS), argv=argv)
        self._remote = RemotePool(self.handle)
        stock = SAMPLE.form.random_model(options.choose(SIZE, LEAST))
        # The pool holds the model for as long as this lives
        self._patcher = parallelize(stock, self._remote, holds_ui_device=False)
        remote = self._patcher.remote
        self._remote.residency.load(
            remote.model, remote.source, lambda: state_source(self._patcher), lambda: False
        )
        self._run = self._remote.runs.begin(remote.model)
        # The sampler's arithmetic is on a GPU as a rule; here its waiting threads would spin on the
        # ranks' cores
        torch.set_num_threads(1)
        self._generator = torch.Generator().manual_seed(0)
        self.bare = Bare()
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

    def hop(self, between_forwards: bool) -> float:
        if between_forwards:
            self.evaluate(costs_nothing=False)
        return self.evaluate(costs_nothing=True)

    def bare_hop(self, between_forwards: bool) -> float:
        if between_forwards:
            self.evaluate(costs_nothing=False)
        return self.bare.words() + self.bare.copies()

    def close(self) -> None:
        self.bare.close()
        self.handle.close()


class Bare:
    """What an evaluation cannot do without: a word to as many processes as a pool has ranks, each
    of which answers by another, and copies of the latent.
    """

    def __init__(self) -> None:
        import torch

        self._here, self._there = torch.randn(2, *LATENT, generator=torch.Generator().manual_seed(0))
        self._processes = [
            subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(RANKS)
        ]
        self._ends = [
            (one.stdin.fileno(), one.stdout.fileno()) for one in self._processes if one.stdin and one.stdout
        ]

    def copies(self) -> float:
        """Time the copies of the latent, in seconds."""
        return timed(lambda: [self._there.copy_(self._here) for _ in range(COPIES)])

    def words(self) -> float:
        """Time until all processes have answered, in seconds."""

        def ask() -> None:
            for to, _ in self._ends:
                os.write(to, b"word")
            for _, back in self._ends:
                os.read(back, 64)

        return timed(ask)

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def bench(options: Options) -> Iterator[Figure]:
    hops, p50, p99 = Hops(options), partial(percentile, share=0.50), partial(percentile, share=0.99)
    per_round, warm_up = options.choose((PER_ROUND, WARM_UP), (dict.fromkeys(PER_ROUND, 1), 1))
    try:
        for case, goal in GOALS.items():
            hop, bare = (partial(one, case == "between_forwards") for one in (hops.hop, hops.bare_hop))
            for _ in range(warm_up):
                hop()
                bare()
            pairs = [[(hop(), bare()) for _ in range(per_round[case])] for _ in range(options.rounds)]
            made = CaseFigures("hop", case, [1e3 * one for pair in pairs for one, _ in pair])
            yield made.estimated("hop_ms_p50", p50, "ms")
            yield made.estimated("hop_ms_p99", p99, "ms")
            rounds = [
                {"hop": median(one for one, _ in pair), "bare": median(one for _, one in pair)}
                for pair in pairs
            ]
            made = CaseFigures("hop", case, rounds)
            yield made.estimated("in_bare", ratio("hop", "bare"), "x", Goal(at_most=goal))
        count = per_round["back_to_back"] * options.rounds
        alone = [1e3 * hops.bare.copies() for _ in range(warm_up + count)][warm_up:]
        yield CaseFigures("hop", "memory_only", alone).estimated("hop_ms_p50", p50, "ms")
    finally:
        hops.close()
