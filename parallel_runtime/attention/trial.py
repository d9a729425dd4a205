"""Find out which kernels a device can be trusted with: each one's output and log-sum-exp on random
input are compared with the explicit ones in fp32.

The log-sum-exp of one kernel may differ from version to version, as cuDNN's does. A wrong one gives
a wrong image without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch

from .kernels import TO_TRY, Ask, Kernel, Kernels, Usable, capability_of, explicit
from .merge_operation import in_one
from .merging import Merge, Partial, merge_partials

HALVES = (torch.bfloat16, torch.float16)
DIMS = (64, 128)
SIZES = (2, 3, 33, 77)  # batch, heads, queries, keys: all different, and no multiples of a block
SCALES = (None, 2.0)  # times what is usual


# The largest difference that is rounding, of the same half-precision q, k and v: of the output in
# units of its standard deviation, of the lse as it is; one in half precision would be off by 0.016
OUT, LSE = 0.06, 5e-3
MERGED = 1e-4  # of values around one, in fp32


def fault_of(kernel: Kernel, device: torch.device, ask: Ask) -> str:
    """Try a kernel on random input. Return a clause that says what is wrong; nothing if it is
    right.
    """
    where = f"for head dim {ask.dim} in {str(ask.dtype).removeprefix('torch.')}"
    try:
        for times in SCALES:
            if text := difference(kernel, device, ask, None if times is None else times * ask.dim**-0.5):
                return f"{where} {text}"
    except Exception as error:  # noqa: BLE001 whatever a kernel meets
        return f"{where} it cannot run ({error_text(error)})"
    return ""


def difference(kernel: Kernel, device: torch.device, ask: Ask, scale: float | None) -> str:
    """Say how a kernel's result differs from that of ``explicit``; empty if it does not. Raises the
    errors of the kernel.
    """
    batch, heads, queries, keys = SIZES
    random = torch.Generator().manual_seed(ask.dim)
    qkv = [
        torch.randn(batch, heads, count, ask.dim, generator=random).to(ask.dtype)
        for count in (queries, keys, keys)
    ]
    mask = torch.randn(batch, 1, queries, keys, generator=random).to(ask.dtype) if ask.is_masked else None
    q, k, v = (t.to(device) for t in qkv)
    out, lse = (t.float().cpu() for t in kernel(q, k, v, None if mask is None else mask.to(device), scale))
    q, k, v = (t.float() for t in qkv)
    due_out, due_lse = explicit(q, k, v, mask, scale)
    for name, made, due in (("output", out, due_out), ("log-sum-exp", lse, due_lse)):
        if made.shape != due.shape:
            return f"its {name} is of shape {tuple(made.shape)}, not {tuple(due.shape)}"
    off_out = float((out - due_out).abs().max() / due_out.std())
    off_lse = float((lse - due_lse).abs().max())
    if off_out <= OUT and off_lse <= LSE:  # False for NaN
        return ""
    return (
        f"its output is off by {off_out:.2g} (rounding: {OUT:g}) and its log-sum-exp by {off_lse:.2g}"
        f" (rounding: {LSE:g})"
    )


def error_text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def asks(device: torch.device) -> list[Ask]:
    capability, dtypes = capability_of(device), (*HALVES, torch.float32)
    return [
        Ask(device.type, dtype, dim, masked, capability)
        for dim in DIMS
        for dtype in dtypes
        for masked in (False, True)
    ]


def tried_kernels(device: torch.device, torchs: Sequence[Usable] = TO_TRY) -> Kernels:
    """Try every kernel that suits the device. Return the kernels that are right, and a sentence for
    each that is not.
    """
    usable: list[Usable] = []
    refused: list[str] = []
    for own in torchs[:-1]:
        faults = (fault_of(own.kernel, device, ask) for ask in asks(device) if own.suits(ask))
        if fault := next(filter(None, faults), ""):
            refused.append(f"{own.name} is not used: {fault}.")
        else:
            usable.append(own)
    merge = merge_partials
    if device.type == "cuda":
        merge, why = chosen_merge(device)
        refused += why
    return Kernels((*usable, torchs[-1]), tuple(refused), merge)


def chosen_merge(device: torch.device, wanted: Merge = in_one) -> tuple[Merge, list[str]]:
    """Try to merge in one kernel, parts of each precision. Return it, or ``merge_partials`` and a
    sentence that says why.
    """
    try:
        offs = [merge_difference(device, wanted, dtype) for dtype in (*HALVES, torch.float32)]
        off = next((off for off in offs if not off <= MERGED), None)  # NaN too
        fault = "" if off is None else f"it is off by {off:.2g} (rounding: {MERGED:g})"
    except Exception as error:  # noqa: BLE001 whatever Triton meets
        fault = f"it cannot run ({error_text(error)})"
    return (merge_partials, [f"The merge in one kernel is not used: {fault}."]) if fault else (wanted, [])


def merge_difference(device: torch.device, wanted: Merge, dtype: torch.dtype) -> float:
    """Return how much a merge differs from ``merge_partials``, of values around one; of larger
    ones, as a part of them. Each part has queries that look at nothing.
    """
    batch, heads, queries, keys = SIZES
    random = torch.Generator().manual_seed(keys)
    parts = []
    for blind in (slice(0, 4), slice(2, 6), slice(3, 7)):
        out = torch.randn(batch, queries, heads, DIMS[0], generator=random).to(dtype).transpose(1, 2)
        lse = 9 * torch.randn(batch, heads, queries, generator=random)
        lse[..., blind] = -math.inf
        parts.append(Partial(out.to(device), lse.to(device), float(keys)))
    found, due = (reduce(merge, parts) for merge in (wanted, merge_partials))
    pairs = zip((found.out, found.level, found.weight), (due.out, due.level, due.weight), strict=True)
    finite = [[torch.as_tensor(one).clamp(min=-1e9) for one in pair] for pair in pairs]
    return float(
        torch.cat([((one - other) / other.abs().clamp(min=1.0)).flatten() for one, other in finite])
        .abs()
        .max()
    )


def usual(kernels: Kernels, device: torch.device) -> str:
    """Return the name of the kernel that most models take: head dim 128, no mask, in bf16 on a
    GPU.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return kernels.choose(Ask(device.type, dtype, 128, False, capability_of(device))).name
