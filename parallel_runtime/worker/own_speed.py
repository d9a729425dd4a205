"""Time what a rank's GPU can do, so that unlike ones can share by it."""

from __future__ import annotations

from statistics import median

import torch

SIDE, TIMES, WARM_UP = 4096, 8, 3


def flops_per_s(device: torch.device) -> float:
    """Return the FLOPs per second of matrix products in half precision, which most of a model is.
    0 on a CPU, whose ranks share its cores evenly, and on a GPU that is full.
    """
    try:
        return timed(device) if device.type == "cuda" else 0.0
    except torch.OutOfMemoryError:
        return 0.0


def timed(device: torch.device) -> float:
    some = torch.randn(SIDE, SIDE, dtype=torch.float16, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + TIMES + 1)]
    for mark in marks:
        mark.record()
        torch.mm(some, some)
    marks[-1].synchronize()
    ms = median(before.elapsed_time(after) for before, after in zip(marks[WARM_UP:], marks[WARM_UP + 1 :], strict=False))
    return 2 * SIDE**3 / max(1e-6, ms / 1e3)
