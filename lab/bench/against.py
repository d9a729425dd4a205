"""Measure this checkout against another: the same prompts on two ComfyUI servers in turns, one with
each pack, so that both have whatever else the machine does.

Of ``fixed`` a run's evaluations do not count, by what the server itself tells of the sampler's
node: the other checkout need not know of it.

``run_ratio`` is the time of a prompt here over its time there, ``added_ratio`` what the pack adds
here to the start of ComfyUI over what it adds there. A goal is missed only where even the
favourable end of the interval misses it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ...launcher.errors import LaunchError
from ...parallel_runtime.families.catalogue import sample_with
from ...parallel_runtime.families.sample import Size
from ..comfyui.api import RunResult, node
from ..comfyui.server import CUSTOM_NODES, ONE_THREAD, ComfyServer
from ..random_files import write_model
from .figures import CaseFigures, Figure, Goal, Options, Round, ratio, typical
from .lockstep import timed

SAMPLE, SIZE = sample_with("demo")
TINY = Size(heads=2, head_dim=SIZE.head_dim, blocks=(2, 2))
DEEP = replace(TINY, blocks=sample_with("deep")[1].blocks)  # as many modules as released models
PIPELINE = {"ulysses": 1, "pipefusion": 2, "patches": 3}


@dataclass(frozen=True)
class Case:
    """A prompt: its model's file, its pool's inputs, and how much it samples."""

    model: str
    pool: dict[str, int]
    pixels: int
    steps: int
    is_cold: bool = False  # the pool's workers are ended before each prompt
    seconds: Callable[[RunResult], float] = lambda result: result.duration_s

    def graph(self, seed: int) -> dict[str, Any]:
        pool = {"devices": "cpu", "layout": "by hand", "backend": "gloo", **self.pool}
        conditioning = {"tokens": 77, "context_dim": SIZE.text_dim, "vec_dim": SIZE.pooled_dim}
        return {
            "unet": node("UNETLoader", unet_name=f"{self.model}.safetensors", weight_dtype="default"),
            "positive": node("PipeMeshDemoConditioning", seed=1, **conditioning),
            "empty": node("EmptySD3LatentImage", width=self.pixels, height=self.pixels, batch_size=1),
            "pool": node("PipeMeshPool", **pool),
            "parallel": node("PipeMeshParallelize", model=["unet", 0], pool=["pool", 0]),
            "sampler": node(
                "KSampler",
                model=["parallel", 0],
                positive=["positive", 0],
                negative=["positive", 0],
                latent_image=["empty", 0],
                seed=seed,
                steps=self.steps,
                cfg=1.0,
                sampler_name="euler",
                scheduler="simple",
                denoise=1.0,
            ),
            "save": node("PipeMeshDemoSaveLatent", samples=["sampler", 0], name="latent"),
        }


def beyond_evaluations(result: RunResult) -> float:
    """Returns the seconds of the sampler's node beyond its steps, each as long as the median of
    those behind the first.
    """
    later = result.steps_s("sampler")
    return result.node_s("sampler") - (1 + len(later)) * median(later)


CASES = {
    "ulysses2": Case("model", {"ulysses": 2}, 320, 4),
    "ring2": Case("model", {"ulysses": 1, "ring": 2}, 320, 4),
    "pipefusion2": Case("model", PIPELINE, 320, 6),
    "hop": Case("tiny", {"ulysses": 2}, 64, 40),  # little but what is not the model
    "hop_of_patches": Case("tiny", PIPELINE, 64, 20),
    "fixed": Case("deep", {"ulysses": 2}, 64, 4, seconds=beyond_evaluations),
    "load": Case("model", {"ulysses": 2}, 64, 1, is_cold=True),
}

SMALLEST = ("hop",)
MOST = {"fixed": 0.6}  # goals other than to be no slower


def server(options: Options, folder: Path, pack: Path | None) -> ComfyServer:
    packs = {**CUSTOM_NODES, "pipemesh": pack} if pack else {}
    env = {**ONE_THREAD, "PIPEMESH_CACHE": str(folder / "cache")}
    made = ComfyServer(options.host, base=folder, env=env, args=["--force-fp32"], custom_nodes=packs)
    models = made.models / "diffusion_models"
    models.mkdir(parents=True, exist_ok=True)
    for name, size in (("model", SIZE), ("tiny", TINY), ("deep", DEEP)) if pack else ():
        write_model(models / f"{name}.safetensors", SAMPLE.form, size)
    return made


def prompt(where: ComfyServer, case: Case, seed: int) -> float:
    """Runs the case's prompt; returns the seconds that it took."""
    for pool in where.get("/pipemesh/status")["pools"] if case.is_cold else ():
        if pool["ranks"]:
            where.post(f"/pipemesh/pools/{pool['id']}/release", {})
    result = where.run(case.graph(seed))
    if result.error is not None:
        raise LaunchError(f"{where.base}: {result.error}\n{where.log_tail()}")
    return case.seconds(result)


def in_turns(rounds: int, sides: dict[str, Callable[[int], float]]) -> list[Round]:
    """Calls each side in every round, the first of the round before last."""
    names = list(sides)
    return [
        {name: sides[name](number) for name in (names if number % 2 else names[::-1])}
        for number in range(1, rounds + 1)
    ]


def added_s(side: str, rounds: Sequence[Round]) -> float:
    return typical(rounds, side) - typical(rounds, "none")


def added_ratio(rounds: Sequence[Round]) -> float:
    return added_s("here", rounds) / added_s("there", rounds)


def start(options: Options, folder: Path, pack: Path | None) -> float:
    """Starts a ComfyUI with this pack, and ends it; returns the seconds until it answers."""
    made = server(options, folder, pack)
    try:
        return timed(made.start)
    finally:
        made.stop()


def bench(options: Options) -> Iterator[Figure]:
    if options.against is None:
        raise LaunchError("The bench `against` needs the folder of another checkout: --against FOLDER.")
    packs = {"here": CUSTOM_NODES["pipemesh"], "there": options.against.absolute()}
    with tempfile.TemporaryDirectory(prefix="pipemesh-against-") as folder, ExitStack() as stack:
        bases = {name: Path(folder, name) for name in (*packs, "none")}
        servers = {
            name: stack.enter_context(server(options, bases[name], pack)) for name, pack in packs.items()
        }
        only = options.only or options.choose((), SMALLEST)
        for name, case in CASES.items():
            if only and name not in only:
                continue

            def of(where: ComfyServer, case: Case = case) -> Callable[[int], float]:
                prompt(where, case, 0)
                return lambda seed: prompt(where, case, seed)

            rounds = in_turns(options.rounds, {side: of(where) for side, where in servers.items()})
            made, goal = CaseFigures("against", name, rounds), Goal(at_most=MOST.get(name, 1.0))
            yield made.estimated("run_ratio", ratio("here", "there"), "ratio", goal)
        stack.close()
        if not only or "start" in only:
            starts: dict[str, Path | None] = {**packs, "none": None}
            of_side = {
                name: lambda _, name=name, pack=pack: start(options, bases[name], pack)
                for name, pack in starts.items()
            }
            in_turns(1, of_side)  # compiles their files
            made = CaseFigures("against", "start", in_turns(options.rounds, of_side))
            for side in packs:
                yield made.estimated(f"added_{side}_s", partial(added_s, side), "s")
            yield made.estimated("added_ratio", added_ratio, "ratio", Goal(at_most=0.5))
