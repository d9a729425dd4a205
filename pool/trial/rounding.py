"""Measures how far rounding moves the end of a run, or one evaluation: parity, the tests and the
comparison of a first shared evaluation take it as their bound.

Kernels add up in another order on another CPU, and ranks in another order than stock. How far that
moves the end of a run depends on the model, the sampler and the prompts, so it is measured: stock
runs once more with every evaluation off by one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...parallel_runtime.client.shared_evaluation import Change, Recompute, SharedEvaluation, as_it_is
from ...parallel_runtime.tolerance import EVALUATION

BOUND = EVALUATION.of_scale
# Of an evaluation's scale: its rms error when ranks share its tokens
ROUNDING = 4 * torch.finfo(torch.float32).eps
FACTOR = 5.0  # CPUs differ from each other, and orders from other orders
MOST = 2.0  # of an evaluation's scale: what is further off is another output, however much is rounding
FP32 = "float32"

SampleModel = Callable[[Any], torch.Tensor]


class Deviation(NamedTuple):
    """How far a shared evaluation is off from the same evaluation on one rank (``size``), and how
    much of that may be rounding (``allowed``). Both are in units of the output's scale.
    ``computed_in`` names the number format of both.
    """

    size: float
    allowed: float
    computed_in: str

    @property
    def is_rounding(self) -> bool:
        return self.size <= self.allowed  # False for NaN


def deviation_of(shared: SharedEvaluation, numbers: str) -> Deviation:
    """Returns how far an evaluation that ranks shared is off from the same evaluation on one rank.
    ``numbers`` is the MODEL's number format, as ``dtypes_of`` returns it. If it is not fp32 and the
    deviation may be rounding, both are computed once more in fp32: in bf16 0.16 of the scale may be
    rounding, and a wrong token plan may be off by only 0.09.
    """
    found = _deviation_of(shared.made, shared.alone, numbers)
    if numbers == FP32 or not found.is_rounding:
        return found

    def in_fp32(compute: Recompute, change: Change = as_it_is) -> list[torch.Tensor]:
        return compute(lambda latent: change(latent.float()), in_fp32=True)

    return _deviation_of(in_fp32(shared.again), partial(in_fp32, shared.alone), FP32)


def _deviation_of(
    ours: list[torch.Tensor], alone: Callable[..., list[torch.Tensor]], numbers: str
) -> Deviation:
    """Compares ``ours`` with the evaluation of one rank. If they differ by more than surely is
    rounding, the size of rounding is measured: the rank computes a latent that is off by one
    rounding, and its output moves as much as by any other order of sums.
    """
    truth = alone()
    error, allowed = EVALUATION.distance(ours, truth), EVALUATION.allowed(truth)
    if error > allowed:
        moved = EVALUATION.distance(alone(off_by_a_rounding), truth)
        allowed = min(MOST, max(allowed, FACTOR * moved))
    return Deviation(error, allowed, numbers)


def off_by_a_rounding(latent: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    size = 4 * torch.finfo(latent.dtype).eps * float(latent.float().std())
    return (latent.float() + size * noise.to(latent.device)).to(latent.dtype)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest difference, in units of the truth's standard deviation; infinite if the
    shapes differ or a number is not finite.
    """
    return EVALUATION.distance([ours], [truth])


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def rounded(model: Any, seed: int = 0) -> Any:
    """A clone of a stock MODEL whose every evaluation is off by one rounding, always the same in a
    run; to be sampled once.

    At next to no noise the model's share of an evaluation is far smaller than the latent that it is
    added to, and its roundings vanish in that sum's own: each number is off by at least that one.
    """
    generator = torch.Generator().manual_seed(seed)

    def evaluate(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        denoised = executor(x, *args, **kwargs)
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        models = ROUNDING * (x - denoised).std() * noise.abs()
        sums = torch.finfo(denoised.dtype).eps * denoised.std()
        return denoised + torch.maximum(models, sums) * noise.sign()

    return wrapped(model, evaluate)


def wrapped(model: Any, evaluate: Callable) -> Any:
    """A clone of a MODEL with ``evaluate`` around every evaluation, outside of other wrappers."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()
    others = clone.wrappers.get(WrappersMP.APPLY_MODEL, {})
    clone.wrappers[WrappersMP.APPLY_MODEL] = {f"bounds {len(others)}": [evaluate], **others}
    return clone


def bound(run: SampleModel, stock: Any, truth: torch.Tensor | None = None) -> float:
    """The largest relative error at the end of ``run`` that rounding explains. ``truth``: the
    result of ``run(stock)``, if it is known.
    """
    return FACTOR * relative_error(run(rounded(stock)), run(stock) if truth is None else truth)
