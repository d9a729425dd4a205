"""Compute attention over a part of the keys, and merge such parts exactly by the log-sum-exp (lse)
of their scores.

Every kernel holds scores and their sums in fp32 whatever q's dtype, so a host that asks for that
precision has it. A query that may look at none of the keys given has out = 0 and lse = -inf: it
does not count in a merge.

Legend: B batch, H heads, Q query tokens, K key tokens, D head dim; ``lse`` is (B, H, Q) in fp32.
Sources: FlashAttention (arXiv 2205.14135, section 3.1) for the merge, torch 2.11's aten kernels
(native_functions.yaml), flash-attn 2/3 (flash_attn_func, return_attn_probs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch

ALIGN = 16  # the efficient kernel wants rows of its bias to begin at multiples of 16 elements

AMPERE, HOPPER = 8, 9  # major compute capabilities
FLASH_PACKAGES = ("flash_attn_interface", "flash_attn")  # flash-attn 3 and 2

OutLse = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "float | None"], OutLse]


class Partial(NamedTuple):
    """Attention over some of the keys, whose exp(scores) add up to ``weight * exp(level)``.

    ``level`` is (B, H, Q) in fp32, ``weight`` the same or the number of keys. They are two numbers
    because beside a level of -1e9 fp32 keeps nothing of log(weight).
    """

    out: torch.Tensor
    level: torch.Tensor
    weight: torch.Tensor | float


def partial_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None) -> Partial:
    """Attend over some of the keys. The arguments are those of ``attention_with_lse``."""
    out, lse = attention_with_lse(q, k, v, mask, scale)
    keys = max(1, k.shape[2])
    return Partial(out, lse - math.log(keys), float(keys))


def merge(first: Partial, second: Partial) -> Partial:
    """Return the attention over both sets of keys, in fp32.

    A row that one large number closes everywhere (-1e9, the smallest of the dtype) comes out as in
    one softmax over all keys: their mean. Only a row whose largest score is such a number, while
    other keys are closed by a larger one or by -inf, is inexact: a kernel's lse does not tell how
    many keys have the largest score, so parts weigh by all their keys.
    """
    level = torch.maximum(first.level, second.level)
    a, b = (share(part, level) for part in (first, second))
    weight = torch.where(level == -math.inf, 1.0, a + b)  # a query that looks at nothing yet: 0 / 1
    out = first.out.float() * (a / weight).unsqueeze(-1) + second.out.float() * (b / weight).unsqueeze(-1)
    return Partial(out, level, weight)


def share(part: Partial, level: torch.Tensor) -> torch.Tensor:
    """Return the part's sum of exp(scores), in units of exp(level)."""
    return part.weight * (part.level - torch.where(level == -math.inf, 0.0, level)).exp()


def attention_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None) -> OutLse:
    """Attend by the fastest kernel for this: return out (B, H, Q, D) in q's dtype, and lse.

    ``q`` (B, H, Q, D), ``k`` and ``v`` (B, H, K, D), ``mask`` additive or boolean: (Q, K), (B, Q,
    K) or (B, 1 or H, 1 or Q, K).
    """
    batch, heads, queries, _ = q.shape
    if queries == 0 or k.shape[2] == 0 or heads == 0 or batch == 0:  # torch's CPU kernel dies of an empty dimension
        return q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    if mask is not None and mask.ndim == 3:  # hosts' (B, Q, K)
        mask = mask.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    mask = None if mask is None else mask.to(q.dtype)
    out, lse = choose_for(q, mask is not None)(q, k, v, mask, scale)
    return (out, lse) if mask is None else without_blind_rows(out, lse, mask)


def without_blind_rows(out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> OutLse:
    """Set out to 0 and lse to -inf for queries that may look at no key: kernels differ in what they
    return there.
    """
    blind = (mask == -math.inf).all(-1)
    return torch.where(blind.unsqueeze(-1), 0.0, out).to(out.dtype), torch.where(blind, -math.inf, lse)


def choose(
    device: str, dtype: torch.dtype, dim: int, masked: bool, capability: tuple[int, int] = (0, 0), installed: Collection[str] = ()
) -> Kernel:
    """Return the fastest kernel for this. ``capability``: the CUDA device's; ``installed``: those
    of FLASH_PACKAGES.
    """
    if device == "cpu":
        return cpu_flash
    if device != "cuda" or dim % 8:
        return explicit
    major, _minor = capability
    half = dtype == torch.float16 or (dtype == torch.bfloat16 and major >= AMPERE)
    if half and not masked and dim <= 256 and major >= AMPERE:
        if "flash_attn_interface" in installed and major == HOPPER:
            return flash_attn("flash_attn_interface")
        return flash_attn("flash_attn") if "flash_attn" in installed else cuda_flash
    return cuda_efficient if half or dtype == torch.float32 else explicit


def choose_for(q: torch.Tensor, masked: bool) -> Kernel:
    capability = (0, 0)
    if q.device.type == "cuda":  # AMD's GPUs have version numbers of their own: all that ROCm's torch runs on count as Ampere
        capability = (AMPERE, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(q.device)
    return choose(q.device.type, q.dtype, q.shape[-1], masked, capability, installed_flash())


@cache
def installed_flash() -> frozenset[str]:
    return frozenset(package for package in FLASH_PACKAGES if find_spec(package) is not None)


def cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out, lse.float()


def cuda_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def cuda_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    bias = None if mask is None else aligned_bias(mask, q, k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def aligned_bias(mask: torch.Tensor, q: torch.Tensor, keys: int) -> torch.Tensor:
    """Copy the mask to (B, H, Q, K) with rows that begin at multiples of ALIGN elements. Dimensions
    of size 1 in the mask are held once.
    """
    bias = q.new_empty(*mask.shape[:-1], -(-keys // ALIGN) * ALIGN)[..., :keys]
    return bias.copy_(mask).expand(*q.shape[:3], keys)


@cache
def flash_attn(module: str) -> Kernel:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> OutLse:
        function: Any = import_module(module).flash_attn_func
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # flash-attn has tokens before heads
        wanted = {"return_attn_probs": True} if "return_attn_probs" in signature(function).parameters else {}  # 3 returned lse always, once
        out, lse, *_ = function(q, k, v, softmax_scale=scale, **wanted)
        return out.transpose(1, 2), lse.float()

    return kernel


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    """Attend in fp32 where no fused kernel can. Holds all scores: (B, H, Q, K)."""
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)).exp()
    return (weights @ v.float()).to(q.dtype), lse
