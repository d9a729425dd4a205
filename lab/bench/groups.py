"""Measure a pool of two groups of one rank: the same runs as stock's in turn, the cores' capacity
taken out. ``queue`` goes further. It is three benches: ``cfg``, positive and negative prompt, of
unequal length; ``data``, two images of a batch; ``windows``, two context windows of one image.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...parallel_runtime.layout import Layout
from ...pool.handle import PoolHandle
from .capacity import capacity, speedup
from .figures import CaseFigures, Figure, Goal, Options, Round, typical
from .lockstep import Phase, Ranks, merge, run, timed
from .pools import cpu_pool

if TYPE_CHECKING:
    from ...parallel_runtime.client.alike_prompts import Moment

EFFICIENCY = {"cfg": 0.97, "data": 0.97, "windows": 0.95}  # goals
TOKENS, STEPS = 1024, 4
LEAST_STEPS = 2  # of smallest cases
SHORTER = 16  # tokens by which the negative prompt is shorter than the positive one
BATCH, SCALE = {"data": 2}, {"cfg": 4.0}  # images, and cfg, else 1
QUEUED = 4  # prompts that differ in the seed
DIM = 2  # of a latent, along which context windows lie


def efficiency(rounds: Sequence[Round]) -> float:
    """Time of stock's run over that of the pool's and the cores' capacity."""
    return typical(rounds, "alone") / (typical(rounds, "parallel") * capacity(rounds))


class GroupRuns:
    """One process of the bench: the sampler over the stock model, and, in the first process, over
    a pool with two groups for ``what`` there are two of; ``beside`` those by a pool of this layout.
    ``devices`` of both pools; ``known``: more of their setup.
    """

    def __init__(
        self,
        ranks: Ranks,
        what: str,
        tokens: int,
        steps: int,
        beside: Layout | None = None,
        devices: str = "cpu",
        **known: Any,
    ):
        import comfy.sd

        from ...parallel_runtime.client.queue_lookahead import QueueLookahead
        from ...parallel_runtime.client.remote_patcher import parallelize
        from ...parallel_runtime.client.remote_pool import RemotePool
        from ..random_files import write_model
        from .forwards import SAMPLE, SIZE, SMALL

        self.what, self.tokens, self.steps = what, tokens, steps
        axis, size = "data" if what in ("data", "queue") else "cfg", ranks.choose(SIZE, SMALL)
        self.ranks, self.handles, self.parallel = ranks, list[PoolHandle](), dict[str, Any]()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.prompts = Prompts(QUEUED)
        self.stock = SAMPLE.form.random_model(size)
        self.all_cores = ranks.all_cores
        layouts = {"parallel": Layout(**{axis: 2}), **({"beside": beside} if beside else {})}
        self.parallel |= dict.fromkeys(layouts)
        if ranks.rank:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="pipemesh-bench-")
        # From a file, as users' are: other weights are looked into at every run
        file = write_model(Path(self._folder.name, "model.safetensors"), SAMPLE.form, size)
        for name, layout in layouts.items():
            self.handles.append(cpu_pool(ranks, layout, devices, **known))
            other_machines = self.handles[-1].placement.other_machines
            self.parallel[name] = parallelize(
                comfy.sd.load_diffusion_model(str(file)),
                RemotePool(self.handles[-1]),
                0.0,
                can_join=not other_machines,
                ahead=QueueLookahead(lambda: self.prompts.now),
            )

    def sample(self, model: Any) -> Any:
        from .forwards import TEXT_TOKENS, sampled

        how = {"images": BATCH.get(self.what, 1), "cfg": SCALE.get(self.what, 1.0)}
        if self.what == "windows":
            model = in_windows(model, self.tokens)
        tokens = TEXT_TOKENS, TEXT_TOKENS - SHORTER
        seeds = self.prompts.each() if self.what == "queue" else (1,)
        return [sampled(model, self.tokens, self.steps, prompts=tokens, seed=seed, **how) for seed in seeds]

    def through(self, name: str) -> float:
        """Seconds of a run through the pool of that name; 0 in the processes that have none."""
        from .forwards import on_cores

        if self.parallel[name] is None:
            return 0.0
        with on_cores(self.all_cores):
            return timed(lambda: self.sample(self.parallel[name]))

    def measure(self, rounds: int, more: Mapping[str, Phase] = MappingProxyType({})) -> list[Round]:
        phases = {
            "alone": Phase(lambda: timed(lambda: self.sample(self.stock)), alone=True),
            **{name: Phase(partial(self.through, name)) for name in self.parallel},
            "both": Phase(lambda: timed(lambda: self.sample(self.stock))),
            **more,
        }
        return self.ranks.measure(phases, rounds)

    def close(self) -> None:
        for handle in self.handles:
            handle.close()
        if self._folder is not None:
            self._folder.cleanup()


class Prompts:
    """So many prompts of a queue, whose seeds differ; ``now``: as a look-ahead sees them."""

    def __init__(self, count: int):
        self._count = count
        self.now: Moment | None = None

    def each(self) -> Iterator[int]:
        """Yields each one's seed, while it is executed."""
        from ...parallel_runtime.client.alike_prompts import Moment, Pending

        graphs = [
            Pending(str(seed), {"1": {"class_type": "KSampler", "inputs": {"seed": seed}}}, ("1",))
            for seed in range(self._count)
        ]
        for seed, (prompt, graph, _) in enumerate(graphs):
            self.now = Moment(prompt, "1", None, graph, tuple(graphs[seed + 1 :]))
            yield seed
        self.now = None


def in_windows(model: Any, tokens: int) -> Any:
    """Return a MODEL that samples in two windows, which have all rows of the latent together."""
    from comfy import context_windows

    from .forwards import ROW_TOKENS, TEXT_TOKENS

    pairs = (tokens - TEXT_TOKENS) // ROW_TOKENS
    rows, window = 2 * pairs, 2 * ((3 * pairs + 4) // 5)
    assert window < rows < 2 * window
    made = model.clone()
    made.model_options["context_handler"] = context_windows.IndexListContextHandler(
        context_windows.get_matching_context_schedule("standard_static"),
        context_windows.get_matching_fuse_method("pyramid"),
        window,
        2 * window - rows,
        dim=DIM,
        causal_window_fix=False,
    )
    return made


def measure(ranks: Ranks, what: str, rounds: int, tokens: int, steps: int) -> list[Round]:
    runs = GroupRuns(ranks, what, tokens, steps)
    try:
        return runs.measure(rounds)
    finally:
        runs.close()


def bench(options: Options) -> Iterator[Figure]:
    from .forwards import LEAST_TOKENS

    what = options.name
    tokens, steps = options.choose((TOKENS, STEPS), (LEAST_TOKENS, LEAST_STEPS))
    asked = {"what": what, "rounds": options.rounds, "tokens": tokens, "steps": steps}
    rounds = merge(run(options, 2, "groups:measure", **asked))
    yield from figures(CaseFigures(what, f"{what}2_{tokens}", rounds), EFFICIENCY[what])


def figures(made: CaseFigures, goal: float) -> Iterator[Figure]:
    yield made.estimated("efficiency", efficiency, "ratio", Goal(at_least=goal))
    yield made.estimated("speedup", speedup, "x")
    yield made.estimated("capacity", capacity, "x")
