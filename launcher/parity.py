"""``python3 -m launcher parity``: stock ComfyUI against the pool, same seed, over the full product of what may differ.

Every case samples through ``comfy.sample.sample`` with the stock MODEL and with its parallel twin; the tests run a pairwise cover.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .host import Host

BOUND = 2e-5  # of the output's scale, fp32: 3e-7 of reordering grows to at most 8.7e-6 over a run
STEPS = 4
CONTEXT_DIM, VEC_DIM = 64, 32


@dataclass(frozen=True)
class Case:
    ranks: int
    tokens: str  # of image and text: "even" or "odd"
    heads: int
    cfg: float
    mask: bool
    sampler: str

    def __str__(self) -> str:
        return f"ulysses{self.ranks}-{self.tokens}-{self.heads}heads-cfg{self.cfg:g}-{'mask' if self.mask else 'nomask'}-{self.sampler}"


AXES: Mapping[str, tuple] = {
    "ranks": (1, 2, 3, 4),
    "tokens": ("even", "odd"),
    "heads": (12, 5),  # divides by every world size here; divides by none
    "cfg": (1.0, 4.0),
    "mask": (False, True),
    "sampler": ("euler", "heun", "dpmpp_2m_sde", "uni_pc"),
}


def full_product() -> list[Case]:
    return [Case(*values) for values in itertools.product(*AXES.values())]


def pairwise_cover(cases: list[Case]) -> list[Case]:
    """A few of ``cases`` in which every pair of values of two axes occurs; greedy, always the same."""
    names = [field.name for field in fields(Case)]

    def pairs(case: Case) -> set[tuple]:
        values = [(name, getattr(case, name)) for name in names]
        return set(itertools.combinations(values, 2))

    missing = set().union(*map(pairs, cases))
    cover = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        cover.append(best)
        missing -= pairs(best)
    return cover


def latent_size(tokens: str) -> tuple[int, int]:
    """Latent height and width: 2x2 latent pixels make a token, the host pads odd sizes."""
    return (16, 12) if tokens == "even" else (13, 18)


def conditioning(seed: int, tokens: int, mask: torch.Tensor | None = None, image: tuple[int, int] = (0, 0)) -> list:
    """``mask`` covers text and image tokens; the host takes it only together with the token grid of the ``image``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    extras: dict[str, Any] = {"pooled_output": torch.randn(1, VEC_DIM, generator=generator)}
    if mask is not None:
        extras |= {"attention_mask": mask, "attention_mask_img_shape": image}
    return [[torch.randn(1, tokens, CONTEXT_DIM, generator=generator), extras]]


def attention_mask(seed: int, tokens: int, closed: float = 0.4) -> torch.Tensor:
    """(1, L, L), additive: a random part of what each token may look at is closed, never a token itself."""
    import torch

    open_ = torch.rand(1, tokens, tokens, generator=torch.Generator().manual_seed(seed)) > closed
    open_ |= torch.eye(tokens, dtype=torch.bool)
    return torch.zeros(1, tokens, tokens).masked_fill(~open_, -10000.0)


def sample(model: Any, case: Case, seed: int = 7, steps: int = STEPS) -> torch.Tensor:
    """What ComfyUI's KSampler computes for this case on this MODEL."""
    import comfy.sample
    import torch

    height, width = latent_size(case.tokens)
    text, negative_text = (16, 24) if case.tokens == "even" else (13, 7)
    grid = (-(-height // 2), -(-width // 2))
    masks = [attention_mask(seed + n, n + grid[0] * grid[1]) if case.mask else None for n in (text, negative_text)]
    with torch.inference_mode():
        latent = torch.zeros(1, 16, height, width)
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, seed),
            steps,
            case.cfg,
            case.sampler,
            "simple",
            conditioning(1, text, masks[0], grid),
            conditioning(2, negative_text, masks[1], grid),
            latent,
            disable_pbar=True,
            seed=seed,
        )


def stock_model(heads: int, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    import torch

    from .tiny import build_flux_patcher, flux_config

    config = flux_config(heads=heads, axes_dim=(4, 6, 6), context_dim=CONTEXT_DIM, vec_dim=VEC_DIM)
    return build_flux_patcher(config, seed, dtype or torch.float32)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, in units of the truth's scale (its standard deviation)."""
    return float((ours - truth).abs().max() / truth.std())


class Bench:
    """Stock models and their parallel twins, made once per number of heads and ranks."""

    def __init__(self, clients: Any):
        self._clients = clients
        self._stock: dict[int, Any] = {}
        self._parallel: dict[tuple[int, int], Any] = {}
        self._truths: dict[Case, torch.Tensor] = {}

    def stock(self, heads: int) -> Any:
        if heads not in self._stock:
            self._stock[heads] = stock_model(heads)
        return self._stock[heads]

    def parallel(self, heads: int, ranks: int) -> Any:
        from ..parallel_runtime.client.remote_patcher import parallelize

        if (heads, ranks) not in self._parallel:
            self._parallel[heads, ranks] = parallelize(self.stock(heads), self._clients(ranks), holds_ui_device=False)
        return self._parallel[heads, ranks]

    def error(self, case: Case) -> float:
        key = Case(**{**asdict(case), "ranks": 1})  # the truth does not depend on the ranks
        if key not in self._truths:
            self._truths[key] = sample(self.stock(case.heads), case)
        return relative_error(sample(self.parallel(case.heads, case.ranks), case), self._truths[key])


def run_cases(cases: Iterable[Case], bench: Bench) -> Iterator[tuple[Case, float]]:
    for case in cases:
        yield case, bench.error(case)


def main(argv: list[str], host: Host) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m launcher parity", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=AXES["ranks"])
    parser.add_argument("--cover", action="store_true", help="only the pairwise cover that CI runs")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args(argv)

    import comfy.cli_args
    import torch

    comfy.cli_args.args.cpu = True
    torch.set_num_threads(1)
    from ..parallel_runtime.client.remote_model import Client
    from ..parallel_runtime.layout import Layout
    from .devices import place
    from .pool import HostSetup, PoolKeeper

    keeper = PoolKeeper(HostSetup(comfyui=host.comfyui, comfy_args={"cpu": True}))
    made: dict[int, Client] = {}

    def clients(ranks: int) -> Client:
        if ranks not in made:
            made[ranks] = Client(keeper.handle(place(Layout(ulysses=ranks), "cpu", "gloo", ())), shares_weights=True)
        return made[ranks]

    cases = [case for case in full_product() if options.ranks in (None, case.ranks)]
    cases = pairwise_cover(cases) if options.cover else cases
    bad = 0
    for case, error in run_cases(sorted(cases, key=lambda case: case.ranks), Bench(clients)):
        bad += error > BOUND
        if options.json:
            print(json.dumps({**asdict(case), "error": error, "bound": BOUND, "ok": error <= BOUND}), flush=True)
        else:
            print(f"{'ok ' if error <= BOUND else 'BAD'} {error:.1e} {case}", flush=True)
    keeper.close()
    print(f"{len(cases) - bad} passed, {bad} failed", file=sys.stderr)
    return 1 if bad else 0
