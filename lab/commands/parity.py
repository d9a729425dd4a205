"""``python3 -m lab parity``: compare stock ComfyUI with the pool at the same seed, over the
full product of samples, methods, token counts, head counts, cfg, masks and samplers.

Every case samples through ``comfy.sample.sample`` with the stock MODEL and with its parallel MODEL.
The tests run a cover.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from ...parallel_runtime.families.catalogue import NOT_HERE, PLAIN, REPRESENTATIVES, SAMPLES
from ...parallel_runtime.families.sample import Sample
from ...parallel_runtime.planner.ways import WAYS
from ...pool.trial.rounding import BOUND, bound, relative_error, rms
from ...pool.trial.tiny_samples import conditioning as conditioning
from ...pool.trial.tiny_samples import empty_latent_of, sampled

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ...launcher.comfyui.host_record import ComfyInstall
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...pool.fork_server import ServerProcess

# Our distance from fp32 over stock bf16's; far below 1, the ranks would not compute in bf16
BF16_BOUNDS = (0.8, 1.2)
STEPS = 4


@dataclass(frozen=True)
class Case:
    family: str  # the name of one of its samples
    method: str
    tokens: str  # "even" or "odd" numbers of image and text tokens
    heads: int
    cfg: float
    mask: bool
    sampler: str

    @property
    def layout(self) -> tuple[int, int]:
        """Degrees of ulysses and ring."""
        return METHODS[self.method]

    @property
    def ranks(self) -> int:
        return self.layout[0] * self.layout[1]

    def __str__(self) -> str:
        mask = "mask" if self.mask else "nomask"
        size = f"{self.tokens}-{self.heads}heads"
        return f"{self.family}-{self.method}-{size}-cfg{self.cfg:g}-{mask}-{self.sampler}"


METHODS: Mapping[str, tuple[int, int]] = {
    "ulysses1": (1, 1),
    "ulysses2": (2, 1),
    "ulysses3": (3, 1),
    "ulysses4": (4, 1),
    "ring2": (1, 2),
    "ring3": (1, 3),
    "ring4": (1, 4),
    "2x2": (2, 2),
}
SAMPLERS = ("euler", "heun", "dpmpp_2m_sde", "uni_pc")
TOKENS, CFGS = ("even", "odd"), (1.0, 4.0)
# Four ranks on two cores: 2x2 has both axes
COVERED = tuple(method for method in METHODS if method not in ("ulysses4", "ring4"))
RINGS = ("2x2", "ring2", "ring3")


def full_product() -> list[Case]:
    return [
        Case(sample.name, *values)
        for sample in SAMPLES.values()
        for values in itertools.product(METHODS, TOKENS, sample.heads, CFGS, mask_values(sample), SAMPLERS)
    ]


def mask_values(sample: Sample) -> tuple[bool, ...]:
    """Return whether cases have a mask: with and without one, or the only way there is."""
    return (sample.masks is not None,) if sample.masks is None or sample.masks.open else (False, True)


def cover() -> list[Case]:
    """The cases that the tests run. Of the representatives a cover of all pairs: of those that have
    several head counts, and of all others together. Of every other sample two cases.
    """
    cases = [case for case in full_product() if case.method in COVERED and case.family in REPRESENTATIVES]
    halves = [
        [case for case in cases if (len(SAMPLES[case.family].heads) > 1) == several]
        for several in (True, False)
    ]
    others = [sample for name, sample in SAMPLES.items() if name not in REPRESENTATIVES]
    return [case for half in halves for case in cover_of(half)] + [
        case for pair in map(two_cases, others, cycle(RINGS)) for case in pair
    ]


def two_cases(sample: Sample, ring: str) -> tuple[Case, Case]:
    """Choose where a plan that brings no new word can fail: tokens that two ranks cannot share
    evenly, unequal prompts and masks under Ulysses; keys that travel around the ``ring``.
    """
    heads = sample.heads[-1]
    odd = Case(sample.name, "ulysses2", "odd", heads, CFGS[-1], sample.masks is not None, SAMPLERS[0])
    return odd, Case(sample.name, ring, "even", heads, CFGS[0], mask_values(sample)[0], SAMPLERS[0])


def cover_of(cases: list[Case]) -> list[Case]:
    """Choose a few of ``cases`` in which every pair of values of two fields occurs that occurs in
    all of them. The choice is greedy and always the same.
    """
    names = [field.name for field in fields(Case)]

    def pairs(case: Case) -> frozenset[tuple]:
        return frozenset(itertools.combinations([(name, getattr(case, name)) for name in names], 2))

    left = {case: pairs(case) for case in cases}
    missing = set().union(*left.values())
    cover = []
    while missing:
        best = max(cases, key=lambda case: len(left[case] & missing))
        cover.append(best)
        missing -= left[best]
    return cover


def empty_latent(case: Case, batch: int = 1) -> Any:
    """A latent of ``batch`` images, or several in a NestedTensor."""
    return empty_latent_of(SAMPLES[case.family], case.tokens, batch)


def sample(
    model: ModelPatcher, case: Case, seed: int = 7, steps: int = STEPS, batch: int = 1
) -> torch.Tensor:
    """Sample a case on a MODEL as ComfyUI's KSampler does. Several latents come back in one row."""
    facts = SAMPLES[case.family]
    return sampled(model, facts, case.tokens, case.cfg, case.mask, case.sampler, seed, steps, batch)


def stock_model(
    heads: int, dtype: torch.dtype = torch.float32, seed: int = 0, family: str = PLAIN
) -> ModelPatcher:
    """Build a stock MODEL of a sample, with random weights and no file behind it."""
    facts = SAMPLES[family]
    return facts.form.random_model(facts.tiny.size(heads), seed, dtype)


class Bench:
    """Stock models, their parallel MODELs and what stock computes, each made once. ``clients``:
    (ulysses, ring) -> a RemotePool. ``weights``: how ranks keep them.
    """

    def __init__(self, clients: Callable[..., RemotePool], weights: str = "whole"):
        self._clients, self._weights = clients, weights
        self.stock = cache(lambda heads, family=PLAIN: stock_model(heads, family=family))
        self.stock_bf16 = cache(lambda heads, family=PLAIN: stock_model(heads, torch.bfloat16, family=family))
        self.truth = cache(
            lambda case, steps=STEPS: sample(self.stock(case.heads, case.family), case, steps=steps)
        )
        self._bound = cache(
            lambda case, steps: bound(
                partial(sample, case=case, steps=steps),
                self.stock(case.heads, case.family),
                self.truth(case, steps),
            )
        )
        self._rounded = cache(lambda case: sample(self.stock_bf16(case.heads, case.family), case))
        self.parallel = cache(
            lambda heads, layout, family=PLAIN: self._parallel(self.stock(heads, family), layout)
        )
        self._parallel_bf16 = cache(
            lambda heads, layout, family: self._parallel(self.stock_bf16(heads, family), layout)
        )

    def _parallel(self, stock: Any, layout: tuple[int, int]) -> Any:
        from ...parallel_runtime.client.remote_patcher import parallelize

        return parallelize(stock, self._clients(*layout), holds_ui_device=False, weights=self._weights)

    def error(self, case: Case, steps: int = STEPS) -> float:
        truth = self.truth(replace(case, method="ulysses1"), steps)  # it does not depend on the method
        ours = sample(self.parallel(case.heads, case.layout, case.family), case, steps=steps)
        return relative_error(ours, truth)

    def bound(self, case: Case, steps: int = STEPS) -> float:
        """Return the largest error that rounding explains, by stock's own sensitivity to it."""
        return self._bound(replace(case, method="ulysses1"), steps)

    def bf16_ratio(self, case: Case) -> float:
        """Return our bf16's distance from the fp32 truth over stock bf16's (root mean squares)."""
        same = replace(case, method="ulysses1")
        truth, rounded = self.truth(same), self._rounded(same)
        stock_distance = rms(rounded - truth)
        assert self.stock_bf16(case.heads, case.family).model.get_dtype_inference() == torch.bfloat16
        return (
            rms(sample(self._parallel_bf16(case.heads, case.layout, case.family), case) - truth)
            / stock_distance
        )


def chosen(argv: list[str]) -> tuple[argparse.Namespace, Sequence[Case]]:
    """Parse the options and select their cases. Exits with a sentence where there are none."""
    in_bf16 = [sample.name for sample in SAMPLES.values() if sample.bf16]
    parser = argparse.ArgumentParser(
        prog="python3 -m lab parity", description="Compare stock ComfyUI with the pool at the same seed."
    )
    parser.add_argument("--family", choices=[*SAMPLES, *NOT_HERE])
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument(
        "--ranks", type=int, choices=sorted({ulysses * ring for ulysses, ring in METHODS.values()})
    )
    parser.add_argument("--weights", choices=WAYS, default="whole", help="how ranks keep them")
    parser.add_argument("--cover", action="store_true", help="only the cover that the tests run")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help=f"in bf16 ({', '.join(in_bf16)}): distance from the fp32 truth over stock's",
    )
    parser.add_argument(
        "--layouts",
        type=int,
        nargs="+",
        metavar="RANKS",
        help="every layout of so many ranks instead, on one family",
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--smallest", action="store_true", help="one case of one step")
    options = parser.parse_args(argv)
    if options.smallest:
        return options, two_cases(SAMPLES[PLAIN], RINGS[1])[:1]
    if options.family in NOT_HERE:
        parser.error(f"{NOT_HERE[options.family]}: run it on that one, or choose another --family")
    families = in_bf16 if options.bf16 else list(SAMPLES)
    if options.family and options.family not in families:
        only = " or ".join(families)
        parser.error(
            f"--bf16 measures {only} alone, not --family {options.family}: choose --family {only} or leave"
            " one of the two out"
        )
    families = [options.family] if options.family else families
    of_family = [case for case in (cover() if options.cover else full_product()) if case.family in families]
    cases = [
        case
        for case in of_family
        if options.ranks in (None, case.ranks) and options.method in (None, case.method)
    ]
    if not cases:
        there = dict.fromkeys(
            f"--method {case.method} (--ranks {case.ranks})" for case in sorted(of_family, key=by_method)
        )
        what = " ".join(
            f"--{name} {getattr(options, name)}"
            for name in ("family", "method", "ranks")
            if getattr(options, name)
        )
        parser.error(
            f"no case {'of the cover ' if options.cover else ''}has {what}: choose of {', '.join(there)}"
        )
    return options, sorted(cases, key=by_method)


def by_method(case: Case) -> int:
    return list(METHODS).index(case.method)


def main(argv: list[str], host: ComfyInstall, server: ServerProcess | None = None) -> int:
    """``server``: ranks are forked from it."""
    options, cases = chosen(argv)

    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    torch.set_num_threads(1)
    from ...parallel_runtime.client.remote_pool import RemotePool
    from ...parallel_runtime.layout import Layout
    from ...pool.devices import place
    from ...pool.handle import PoolKeeper
    from ...pool.rank_setup import RankSetup
    from . import every_layout

    if options.layouts:
        return every_layout.main(options.layouts, host, options.json)
    forked: dict[str, Any] = {} if server is None else {"start": server.fork}
    keeper = PoolKeeper(RankSetup(comfyui=host.comfyui, comfy_args={"cpu": True}, **forked))

    @cache
    def clients(ulysses: int, ring: int) -> RemotePool:
        return RemotePool(keeper.handle(place(Layout(ulysses=ulysses, ring=ring), "cpu", "gloo", ())))

    bench = Bench(clients, options.weights)
    error_of = partial(bench.error, steps=1) if options.smallest else bench.error
    figure, (least, most) = (bench.bf16_ratio, BF16_BOUNDS) if options.bf16 else (error_of, (0.0, BOUND))
    bad = 0
    for case in cases:
        error, allowed = figure(case), most
        if error > most and not options.bf16:
            allowed = max(most, bench.bound(case))
        ok = least <= error <= allowed  # False for NaN
        bad += not ok
        if options.json:
            name = "bf16_ratio" if options.bf16 else "error"
            print(json.dumps({**asdict(case), name: error, "bound": allowed, "ok": ok}), flush=True)
        else:
            beside = f", stock's own sensitivity allows {allowed:.2g}" if allowed > most else ""
            print(f"{'ok ' if ok else 'BAD'} {error:.2g} {case}{beside}", flush=True)
    keeper.close()
    print(f"{len(cases) - bad} passed, {bad} failed", file=sys.stderr)
    return 1 if bad else 0
