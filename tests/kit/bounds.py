"""Bounds on differences that no CPU's rounding breaks: ``pool/trial/rounding.py`` measures
them. A sampler that chooses its steps by a norm would choose others there; its evaluations are
compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pipemesh.lab.commands.parity import BOUND
from pipemesh.pool.trial.rounding import FACTOR, ROUNDING, SampleModel, bound, relative_error, wrapped

DEVIATIONS = 5.0  # of the largest among a million normal deviates
ADAPTIVE = ("dpm_adaptive",)  # samplers to replay


def assert_same(run: SampleModel, ours: Any, stock: Any) -> None:
    """Hold the end of ``run`` on our MODEL to what it is on the stock one."""
    truth = run(stock)
    assert relative_error(run(ours), truth) <= bound(run, stock, truth)


def assert_replayed(run: SampleModel, ours: Any, stock: Any) -> None:
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


def assert_honoured(
    change: Callable[[Any], Any], run: SampleModel, ours: Any, stock: Any, least: float = 0.01
) -> None:
    """Hold what a node does to our MODEL to what it does to the stock one: something, the same, and
    no longer than it is there.
    """
    plain, truth = run(stock), run(change(stock))
    assert relative_error(truth, plain) > least, "the change does nothing"
    assert relative_error(run(change(ours)), truth) <= BOUND
    assert relative_error(run(ours), plain) <= BOUND, "the change stays"
