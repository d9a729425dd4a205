"""Bounds on differences that no CPU's rounding breaks.

Kernels add up in another order on another CPU, and ranks in another order than stock. How far that
moves the end of a run depends on the sampler and the prompts, so it is measured: stock runs once
more with every evaluation off by one rounding. A sampler that chooses its steps by a norm would
choose others then; its evaluations are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from pipemesh.launcher.commands.parity import relative_error

ROUNDING = 4 * torch.finfo(torch.float32).eps  # of an evaluation's scale: its rms error when ranks share its tokens
FACTOR = 5.0  # CPUs differ from each other, and orders from other orders
DEVIATIONS = 5.0  # of the largest among a million normal deviates
ADAPTIVE = ("dpm_adaptive",)  # samplers to replay

Run = Callable[[Any], torch.Tensor]


def rounded(model: Any, seed: int = 0) -> Any:
    """A clone of a stock MODEL whose every evaluation is off by one rounding, always the same in a
    run; to be sampled once.
    """
    generator = torch.Generator().manual_seed(seed)

    def evaluate(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        denoised = executor(x, *args, **kwargs)
        return denoised + ROUNDING * (x - denoised).std() * torch.randn(x.shape, generator=generator)

    return wrapped(model, evaluate)


def wrapped(model: Any, evaluate: Callable) -> Any:
    """A clone of a MODEL with ``evaluate`` around every evaluation, outside of other wrappers."""
    clone = model.clone()
    others = clone.wrappers.get(WrappersMP.APPLY_MODEL, {})
    clone.wrappers[WrappersMP.APPLY_MODEL] = {f"bounds {len(others)}": [evaluate], **others}
    return clone


def bound(run: Run, stock: Any, truth: torch.Tensor | None = None) -> float:
    """The largest relative error at the end of ``run`` that rounding explains. ``truth``: what
    ``run(stock)`` gives, where it is known.
    """
    return FACTOR * relative_error(run(rounded(stock)), run(stock) if truth is None else truth)


def assert_same(run: Run, ours: Any, stock: Any) -> None:
    """Hold the end of ``run`` on our MODEL to what it is on the stock one."""
    truth = run(stock)
    assert relative_error(run(ours), truth) <= bound(run, stock, truth)


def assert_replayed(run: Run, ours: Any, stock: Any) -> None:
    """Hold every evaluation of our MODEL to stock's of the same inputs: ours gets stock's outputs
    back, so the sampler goes the same way on both. Not for free-running patches, nor where ComfyUI
    evaluates conds together on one side only.
    """
    recorded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        denoised = executor(x, *args, **kwargs)
        recorded.append((x.clone(), denoised.clone()))
        return denoised

    truth = run(wrapped(stock, record))
    left = iter(enumerate(recorded, 1))

    def replay(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        number, (given, denoised) = next(left)
        assert torch.equal(x, given), f"evaluation {number} has other inputs than stock's"
        error = float((executor(x, *args, **kwargs) - denoised).abs().max() / (x - denoised).std())
        assert error <= FACTOR * DEVIATIONS * ROUNDING, f"evaluation {number} is off by {error:.1e}"
        return denoised

    assert torch.equal(run(wrapped(ours, replay)), truth)
    assert recorded and next(left, None) is None, "stock evaluates more often"
