"""How far rounding moves the end of a run: what parity, and the tests, hold a difference to.

Kernels add up in another order on another CPU, and ranks in another order than stock. How far that
moves the end of a run depends on the model, the sampler and the prompts, so it is measured: stock
runs once more with every evaluation off by one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BOUND = 2e-5  # of the output's scale, fp32: 3e-7 of reordering grows to at most 8.7e-6 over a run
# Of an evaluation's scale: its rms error when ranks share its tokens
ROUNDING = 4 * torch.finfo(torch.float32).eps
FACTOR = 5.0  # CPUs differ from each other, and orders from other orders

Run = Callable[[Any], torch.Tensor]


def bound_of_one(dtype: torch.dtype) -> float:
    """The largest relative error of one evaluation in such numbers that is surely rounding."""
    return max(BOUND, FACTOR * 4 * torch.finfo(dtype).eps)


def off_by_a_rounding(latent: torch.Tensor, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
    size = 4 * torch.finfo(latent.dtype).eps * float(latent.float().std())
    return (latent.float() + size * noise.to(latent.device)).to(latent.dtype)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest difference, in units of the truth's standard deviation; infinite for
    another shape and for what is no number.
    """
    if ours.shape != truth.shape or not torch.isfinite(ours).all():
        return float("inf")
    return float((ours - truth).abs().max() / truth.std().clamp(min=1e-12))


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def rounded(model: Any, seed: int = 0) -> Any:
    """A clone of a stock MODEL whose every evaluation is off by one rounding, always the same in a
    run; to be sampled once.
    """
    generator = torch.Generator().manual_seed(seed)

    def evaluate(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        denoised = executor(x, *args, **kwargs)
        return denoised + ROUNDING * (x - denoised).std() * torch.randn(x.shape, generator=generator).to(
            x.device
        )

    return wrapped(model, evaluate)


def wrapped(model: Any, evaluate: Callable) -> Any:
    """A clone of a MODEL with ``evaluate`` around every evaluation, outside of other wrappers."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()
    others = clone.wrappers.get(WrappersMP.APPLY_MODEL, {})
    clone.wrappers[WrappersMP.APPLY_MODEL] = {f"bounds {len(others)}": [evaluate], **others}
    return clone


def bound(run: Run, stock: Any, truth: torch.Tensor | None = None) -> float:
    """The largest relative error at the end of ``run`` that rounding explains. ``truth``: what
    ``run(stock)`` gives, where it is known.
    """
    return FACTOR * relative_error(run(rounded(stock)), run(stock) if truth is None else truth)
