"""Time the matrix products of a rank's GPU, so that unlike GPUs can share work by their speeds."""

from __future__ import annotations

import itertools
import time
from statistics import median

import torch

SIDE, TIMES = 4096, 8
HALF_IS_FAST = (7, 0)  # of NVIDIA's: the consumers' GPUs before compute half precision at a 64th of the speed
WARM_UP_S = 0.5  # a GPU that was idle takes some tenths of a second to its full clock


def flops_per_s(device: torch.device) -> float:
    """Return the FLOPs per second of matrix products, which are most of a model's work, in the
    precision that ComfyUI would compute in. 0 on a CPU, whose ranks share its cores evenly, and on
    a GPU that is full or cannot say.
    """
    if device.type != "cuda":
        return 0.0
    try:
        return timed(
            device,
            torch.float16 if torch.cuda.get_device_capability(device) >= HALF_IS_FAST else torch.float32,
        )
    except RuntimeError:
        return 0.0


def timed(device: torch.device, dtype: torch.dtype) -> float:
    some = torch.randn(SIDE, SIDE, dtype=dtype, device=device)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        torch.mm(some, some)
        torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    for mark in marks:
        mark.record()
        torch.mm(some, some)
    marks[-1].synchronize()
    ms = median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    return 2 * SIDE**3 / max(1e-6, ms / 1e3)
