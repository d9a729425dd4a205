"""A VAE's ways of computing some frames at a time, made the same on every rank of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from ..comm.bands import ROWS
from ..comm.rows import RowExchange
from ..vae_modules import CHUNK_SIZE

CHUNK = 64 * 2**20  # bytes of frames that are computed at once; ComfyUI has 32 to 128 MiB, by a GPU's memory


def convolve_frames(
    rows: RowExchange,
    module: Any,
    own: Callable[..., Any],
    x: torch.Tensor,
    conv_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve one frame behind copies of itself: ComfyUI then has a faster way, which calls no
    layer that could be hooked.
    """
    if rows.size == 1 or module.time_kernel_size == 1 or x.shape[2] > 1 or conv_cache is not None:
        return own(x, conv_cache=conv_cache)
    return own(x, conv_cache=x.repeat_interleave(module.time_kernel_size - 1, 2))[0], None


def compute_in_chunks(
    rows: RowExchange, module: Any, own: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute frames in chunks that are as many on each rank: ComfyUI measures them by the device's
    memory and by the rows it is given, and every convolution of one is a message.
    """
    if rows.size == 1:
        return own(x, *args, **kwargs)
    size = CHUNK // max(rows.bands.rows) * x.shape[ROWS]
    names = {**own.__globals__, CHUNK_SIZE: lambda _device: size}
    alike = FunctionType(own.__code__, names, None, own.__defaults__, own.__closure__)
    if hasattr(module, "decode_output_shape"):  # else it is made in main memory
        kwargs["output_buffer"] = x.new_empty(module.decode_output_shape(x.shape))
    return alike(module, x, *args, **kwargs)
