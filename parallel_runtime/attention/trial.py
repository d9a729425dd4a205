"""Find out which kernels a device can be trusted with: each one's output and log-sum-exp on random
input are held to the explicit ones in fp32.

Kernels of one name differ: in the base of the logarithm, in whether heads or tokens come first, in
the names of their arguments. A wrong lse gives a wrong image without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch

from .kernels import TO_TRY, Ask, Kernel, Kernels, Usable, capability_of, explicit
from .merge_operation import in_one
from .merging import Merge, Partial, merge_partials
from .packages import PACKAGES, Candidate

HALVES = (torch.bfloat16, torch.float16)
RELEASED_DIMS = (64, 72, 96, 120, 128, 256)  # head dims of models that people run
DIMS = (64, 128)  # for kernels that have no code of their own for each
SIZES = (2, 3, 33, 77)  # batch, heads, queries, keys: all different, and no multiples of a block
SCALES = (None, 2.0)  # times what is usual


class Bounds(NamedTuple):
    """The largest difference that is rounding: of the output in units of its standard deviation, of
    the lse as it is.
    """

    out: float
    lse: float


# Of the same half-precision q, k and v; an lse in half precision would be off by 0.016
EXACT = Bounds(0.06, 5e-3)
ROUNDED = Bounds(0.4, 0.1)  # queries and keys in 8 bits
MERGED = 1e-4  # of values around one, in fp32


class Fault(NamedTuple):
    """A clause about a kernel. ``differs``: what it computes is wrong; else it computes nothing."""

    text: str
    differs: bool


def fault_of(kernel: Kernel, device: torch.device, ask: Ask, bounds: Bounds) -> Fault | None:
    """Try a kernel on random input. None where it is right."""
    where = f"for head dim {ask.dim} in {str(ask.dtype).removeprefix('torch.')}"
    try:
        for times in SCALES:
            text = difference(kernel, device, ask, None if times is None else times * ask.dim**-0.5, bounds)
            if text:
                return Fault(f"{where} {text}", differs=True)
    except Exception as error:  # noqa: BLE001 whatever a package meets
        return Fault(f"{where} it cannot run ({error_text(error)})", differs=False)
    return None


def difference(kernel: Kernel, device: torch.device, ask: Ask, scale: float | None, bounds: Bounds) -> str:
    """Say how a kernel's result differs from that of ``explicit``; nothing where it does not.
    Raises what the kernel raises.
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
    off = Bounds(float((out - due_out).abs().max() / due_out.std()), float((lse - due_lse).abs().max()))
    if off.out <= bounds.out and off.lse <= bounds.lse:  # False for NaN
        return ""
    return (
        f"its output is off by {off.out:.2g} (rounding: {bounds.out:g}) and its log-sum-exp by {off.lse:.2g}"
        f" (rounding: {bounds.lse:g})"
    )


def error_text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def asks(device: torch.device, dims: Iterable[int], host: str = "") -> list[Ask]:
    capability, dtypes = capability_of(device), (*HALVES, torch.float32)
    return [
        Ask(device.type, dtype, dim, masked, capability, host)
        for dim in dims
        for dtype in dtypes
        for masked in (False, True)
    ]


def tried_kernels(
    device: torch.device, packages: Sequence[Candidate] = PACKAGES, torchs: Sequence[Usable] = TO_TRY
) -> Kernels:
    """Try every kernel that suits the device and is installed; return those that are right, and a
    sentence for each that is not. A package is not imported where earlier ones take all that it
    suits.
    """
    usable: list[Usable] = []
    refused: list[str] = []
    for candidate in packages:
        due = [
            ask
            for ask in asks(device, RELEASED_DIMS, candidate.stands_for)
            if candidate.suits(ask) and not any(other.suits(ask) for other in usable)
        ]
        if not due or not candidate.is_installed:
            continue
        found = judged(candidate, device, due)
        if isinstance(found, Usable):
            usable.append(found)
        else:
            refused.append(f"{candidate.name} is not used: {found}.")
    for own in torchs[:-1]:
        faults = [fault_of(own.kernel, device, ask, EXACT) for ask in asks(device, DIMS) if own.suits(ask)]
        fault = next((fault for fault in faults if fault), None)
        if fault:
            refused.append(f"{own.name} is not used: {fault.text}.")
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


def judged(candidate: Candidate, device: torch.device, due: Sequence[Ask]) -> Usable | str:
    """Return the candidate for those of ``due`` that it computes, or a clause that says why it is
    not used: one wrong result is enough.
    """
    try:
        kernel = candidate.load()
    except Exception as error:  # noqa: BLE001 whatever a package meets when it is imported
        return f"it cannot be loaded ({error_text(error)})"
    faults = {ask: fault_of(kernel, device, ask, ROUNDED if candidate.stands_for else EXACT) for ask in due}
    right = frozenset((ask.dtype, ask.dim) for ask, fault in faults.items() if fault is None)
    fault = next((fault for fault in faults.values() if fault and (fault.differs or not right)), None)
    if fault:
        return fault.text

    def suits(ask: Ask) -> bool:
        return (ask.dtype, ask.dim) in right and candidate.suits(ask)

    return Usable(candidate.name, kernel, suits, candidate.stands_for)


def usual(kernels: Kernels, device: torch.device) -> str:
    """Return the name of the kernel that most models take: head dim 128, no mask, in bf16 on a
    GPU.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return kernels.choose(Ask(device.type, dtype, 128, False, capability_of(device))).name
