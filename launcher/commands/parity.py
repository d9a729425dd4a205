"""``python3 -m launcher parity``: stock ComfyUI against the pool, same seed, over the full product
of what may differ.

Every case samples through ``comfy.sample.sample`` with the stock MODEL and with its parallel twin;
the tests run a pairwise cover.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ...parallel_runtime.client.remote_model import Client
    from ..comfyui.find import ComfyInstall

BOUND = 2e-5  # of the output's scale, fp32: 3e-7 of reordering grows to at most 8.7e-6 over a run
BF16_BOUNDS = (0.8, 1.2)  # our distance from the fp32 truth over stock bf16's; far below 1, the ranks would not compute in bf16
STEPS = 4
CONTEXT_DIM, VEC_DIM = 64, 32
FLUX2_TEXT = 512  # tokens: the host pads shorter texts


@dataclass(frozen=True)
class Case:
    family: str
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
        return f"{self.family}-{self.method}-{self.tokens}-{self.heads}heads-cfg{self.cfg:g}-{mask}-{self.sampler}"


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
FAMILIES: Mapping[str, tuple[tuple[int, ...], tuple[bool, ...]]] = {  # head counts to try, and whether masks exist
    "flux": ((12, 5), (False, True)),  # 12 divides by every world size here, 5 by none
    "flux2": ((5,), (False, True)),
    "sd3": ((5,), (False,)),
    "sd3.5-medium": ((3,), (False,)),
    "wan2.1-t2v": ((5,), (False,)),
    "wan2.1-i2v": ((5,), (False,)),
    "wan2.2-5b": ((5,), (False,)),
}


def full_product() -> list[Case]:
    return [
        Case(family, *values)
        for family, (heads, masks) in FAMILIES.items()
        for values in itertools.product(METHODS, TOKENS, heads, CFGS, masks, SAMPLERS)
    ]


def tested_cases() -> list[Case]:
    """What the tests run: a cover of Flux, where head counts differ, and one of all other families
    together.
    """
    cases = full_product()
    return [case for flux in (True, False) for case in cover_of([case for case in cases if (case.family == "flux") == flux])]


def cover_of(cases: list[Case]) -> list[Case]:
    """A few of ``cases`` in which every pair of values of two axes that occurs in them occurs;
    greedy, always the same.
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


def latent_shape(family: str, tokens: str) -> tuple[int, ...]:
    """2x2 latent pixels make a token, except in Flux 2; the host pads odd sizes."""
    if family == "flux2":
        return (1, 128, 8, 6) if tokens == "even" else (1, 128, 5, 7)
    if family.startswith("wan"):
        channels = 48 if family == "wan2.2-5b" else 16
        return (1, channels, 3, 8, 6) if tokens == "even" else (1, channels, 3, 5, 6)
    return (1, 16, 16, 12) if tokens == "even" else (1, 16, 13, 18)


def masks_of(case: Case, texts: tuple[int, int], latent: torch.Tensor) -> tuple[list[torch.Tensor | None], tuple[int, int]]:
    """One for each prompt, over its text and image tokens, and the image's token grid. The host
    pads the text of Flux 2.
    """
    side = 1 if case.family == "flux2" else 2
    grid = (-(-latent.shape[-2] // side), -(-latent.shape[-1] // side))
    masks = []
    for text in texts:
        whole = FLUX2_TEXT if case.family == "flux2" else text
        masks.append(attention_mask(7 + text, whole + grid[0] * grid[1]) if case.mask else None)
    return masks, grid


def conditioning(seed: int, tokens: int, mask: torch.Tensor | None = None, image: tuple[int, int] = (0, 0)) -> list:
    """``mask`` covers text and image tokens; the host takes it only together with the token grid of
    the ``image``.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    extras: dict[str, Any] = {"pooled_output": torch.randn(1, VEC_DIM, generator=generator)}
    if mask is not None:
        extras |= {"attention_mask": mask, "attention_mask_img_shape": image}
    return [[torch.randn(1, tokens, CONTEXT_DIM, generator=generator), extras]]


def attention_mask(seed: int, tokens: int, closed: float = 0.4) -> torch.Tensor:
    """(1, L, L), additive: a random part of what each token may look at is closed, never a token
    itself.
    """
    import torch

    open_ = torch.rand(1, tokens, tokens, generator=torch.Generator().manual_seed(seed)) > closed
    open_ |= torch.eye(tokens, dtype=torch.bool)
    return torch.zeros(1, tokens, tokens).masked_fill(~open_, -10000.0)


def sample(model: Any, case: Case, seed: int = 7, steps: int = STEPS) -> torch.Tensor:
    """What ComfyUI's KSampler computes for this case on this MODEL."""
    import comfy.sample
    import torch

    latent = torch.zeros(latent_shape(case.family, case.tokens))
    texts = (16, 24) if case.tokens == "even" else (13, 7)
    masks, grid = masks_of(case, texts, latent)
    prompts = [conditioning(number, n, mask, grid) for number, n, mask in zip((1, 2), texts, masks, strict=True)]
    options = {}
    if case.family == "wan2.1-i2v":
        prompts = [[[tensor, {**extras, **first_frame(latent)}] for tensor, extras in prompt] for prompt in prompts]
    if case.family == "wan2.2-5b":  # the first frame is given: it has a timestep of its own
        options["noise_mask"] = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1, 1).expand(1, 1, *latent.shape[2:])
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, seed)
        return comfy.sample.sample(
            model, noise, steps, case.cfg, case.sampler, "simple", *prompts, latent, disable_pbar=True, seed=seed, **options
        )


def first_frame(latent: torch.Tensor) -> dict[str, Any]:
    """What an image-to-video node adds to a prompt: the frame as latent channels, and as a CLIP
    vision embedding.
    """
    import torch

    generator = torch.Generator().manual_seed(4)
    embedding = SimpleNamespace(penultimate_hidden_states=torch.randn(1, 9, 1280, generator=generator))
    image = torch.randn(latent.shape, generator=generator)
    return {"concat_latent_image": image, "concat_mask": torch.ones(1, 1, *latent.shape[2:]), "clip_vision_output": embedding}


def stock_model(heads: int, dtype: torch.dtype | None = None, seed: int = 0, family: str = "flux") -> Any:
    """A stock MODEL of a family with random weights and no file behind it."""
    import torch

    from ..random_models import flux2_patcher, sd3_patcher, wan_patcher
    from ..tiny import build_flux_patcher, flux_config

    if family == "flux":
        config = flux_config(heads=heads, axes_dim=(4, 6, 6), context_dim=CONTEXT_DIM, vec_dim=VEC_DIM)
        patcher = build_flux_patcher(config, seed, dtype or torch.float32)
        patcher.model.manual_cast_dtype = None  # on a CPU the host would compute in fp32 whatever the weights are
        return patcher
    if family == "flux2":
        return flux2_patcher(heads)
    if family.startswith("sd3"):
        return sd3_patcher(medium=family == "sd3.5-medium", depth=heads)
    return wan_patcher(model_type=family[-3:] if family.endswith("2v") else "t2v", per_frame=family == "wan2.2-5b", heads=heads)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, in units of the truth's scale (its standard deviation)."""
    return float((ours - truth).abs().max() / truth.std())


class Bench:
    """Stock models, their parallel twins and what stock computes, each made once. ``clients``:
    (ulysses, ring) -> a Client.
    """

    def __init__(self, clients: Callable[..., Client]):
        self._clients = clients
        self.stock = cache(lambda heads, family="flux": stock_model(heads, family=family))
        self.stock_bf16 = cache(lambda heads: stock_model(heads, bf16()))
        self.truth = cache(lambda case: sample(self.stock(case.heads, case.family), case))
        self._rounded = cache(lambda case: sample(self.stock_bf16(case.heads), case))
        self.parallel = cache(lambda heads, layout, family="flux": self._parallel(self.stock(heads, family), layout))
        self._parallel_bf16 = cache(lambda heads, layout: self._parallel(self.stock_bf16(heads), layout))

    def _parallel(self, stock: Any, layout: tuple[int, int]) -> Any:
        from ...parallel_runtime.client.remote_patcher import parallelize

        return parallelize(stock, self._clients(*layout), holds_ui_device=False)

    def error(self, case: Case) -> float:
        truth = self.truth(replace(case, method="ulysses1"))  # it does not depend on the method
        return relative_error(sample(self.parallel(case.heads, case.layout, case.family), case), truth)

    def bf16_ratio(self, case: Case) -> float:
        """Our bf16's distance from the fp32 truth over stock bf16's (root mean squares). Flux only,
        its dtype forced.
        """
        same = replace(case, method="ulysses1")
        truth, rounded = self.truth(same), self._rounded(same)
        stock_distance = rms(rounded - truth)
        assert self.stock_bf16(case.heads).model.get_dtype_inference() == bf16()
        return rms(sample(self._parallel_bf16(case.heads, case.layout), case) - truth) / stock_distance


def bf16() -> torch.dtype:
    import torch

    return torch.bfloat16


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def chosen(argv: list[str]) -> tuple[argparse.Namespace, list[Case]]:
    """The options and the cases they select; exits with a sentence where that is none."""
    parser = argparse.ArgumentParser(prog="python3 -m launcher parity", description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--ranks", type=int, choices=sorted({ulysses * ring for ulysses, ring in METHODS.values()}))
    parser.add_argument("--cover", action="store_true", help="only the pairwise cover that the tests run")
    parser.add_argument("--bf16", action="store_true", help="Flux in bf16: its distance from the fp32 truth over stock bf16's")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args(argv)
    if options.bf16 and options.family not in (None, "flux"):
        parser.error(f"--bf16 measures Flux 1 alone, not --family {options.family}: choose --family flux or leave one of the two out")
    family = "flux" if options.bf16 else options.family
    of_family = [case for case in (tested_cases() if options.cover else full_product()) if family in (None, case.family)]
    cases = [case for case in of_family if options.ranks in (None, case.ranks) and options.method in (None, case.method)]
    if not cases:
        there = dict.fromkeys(f"--method {case.method} (--ranks {case.ranks})" for case in sorted(of_family, key=by_method))
        what = " ".join(f"--{name} {getattr(options, name)}" for name in ("family", "method", "ranks") if getattr(options, name))
        parser.error(f"no case {'of the cover ' if options.cover else ''}has {what}: choose of {', '.join(there)}")
    return options, sorted(cases, key=by_method)


def by_method(case: Case) -> int:
    return list(METHODS).index(case.method)


def main(argv: list[str], host: ComfyInstall) -> int:
    options, cases = chosen(argv)

    import comfy.cli_args
    import torch

    comfy.cli_args.args.cpu = True
    torch.set_num_threads(1)
    from ...parallel_runtime.client.remote_model import Client
    from ...parallel_runtime.layout import Layout
    from ..pool.devices import place
    from ..pool.pool import PoolKeeper, RankSetup

    keeper = PoolKeeper(RankSetup(comfyui=host.comfyui, comfy_args={"cpu": True}))

    @cache
    def clients(ulysses: int, ring: int) -> Client:
        return Client(keeper.handle(place(Layout(ulysses=ulysses, ring=ring), "cpu", "gloo", ())), shares_weights=True)

    bench = Bench(clients)
    figure, (least, bound) = (bench.bf16_ratio, BF16_BOUNDS) if options.bf16 else (bench.error, (0.0, BOUND))
    bad = 0
    for case in cases:
        error = figure(case)
        ok = least <= error <= bound  # False for NaN
        bad += not ok
        if options.json:
            name = "bf16_ratio" if options.bf16 else "error"
            print(json.dumps({**asdict(case), name: error, "bound": bound, "ok": ok}), flush=True)
        else:
            print(f"{'ok ' if ok else 'BAD'} {error:.2g} {case}", flush=True)
    keeper.close()
    print(f"{len(cases) - bad} passed, {bad} failed", file=sys.stderr)
    return 1 if bad else 0
