"""Attention kernels that return the log-sum-exp of their scores, and the exact merge of partial outputs.

Legend: B batch, H heads, Q query tokens, K key tokens, D head dim. ``lse`` is (B, H, Q) in fp32; a query that may look at none of the keys
given has out = 0 and lse = -inf, so that it does not count in a merge. Sources: FlashAttention (arXiv 2205.14135, section 3.1) for the
merge, torch 2.11's aten kernels (native_functions.yaml), flash-attn 2/3 (flash_attn_func, return_attn_probs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

ALIGN = 16  # the efficient kernel wants rows of its bias to begin at multiples of 16 elements

Partial = tuple[torch.Tensor, torch.Tensor]


def attention_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None) -> Partial:
    """``q`` (B, H, Q, D), ``k`` and ``v`` (B, H, K, D), ``mask`` additive or boolean: (Q, K), (B, Q, K) or (B, 1 or H, 1 or Q, K).

    Returns out (B, H, Q, D) in q's dtype and lse (B, H, Q).
    """
    batch, heads, queries, _ = q.shape
    if queries == 0 or k.shape[2] == 0 or heads == 0 or batch == 0:  # torch's CPU kernel dies of an empty dimension
        return q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    if mask is not None and mask.ndim == 3:  # hosts' (B, Q, K)
        mask = mask.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    out, lse = choose(q, mask)(q, k, v, mask, scale)
    return (out, lse) if mask is None else without_blind_rows(out, lse, mask)


def without_blind_rows(out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> Partial:
    """Kernels differ in what they return for a query that may look at nothing; here it is 0 and -inf."""
    blind = (mask == -math.inf).all(-1)
    return torch.where(blind.unsqueeze(-1), 0.0, out).to(out.dtype), torch.where(blind, -math.inf, lse)


def merge(first: Partial, second: Partial) -> Partial:
    """The attention over both sets of keys, in fp32."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse == -math.inf, 0.0, lse)  # a query that looks at nothing yet: both weights are 0, not NaN
    weight_a, weight_b = (lse_a - base).exp().unsqueeze(-1), (lse_b - base).exp().unsqueeze(-1)
    return out_a.float() * weight_a + out_b.float() * weight_b, lse


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "float | None"], Partial]


def choose(q: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """The fastest kernel that takes this device, dtype, head dim and mask."""
    dim, half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu":
        return cpu_flash
    if q.device.type != "cuda":
        return explicit
    if mask is None and half and dim <= 256 and dim % 8 == 0:
        return installed_flash() or cuda_flash
    if (half or q.dtype == torch.float32) and dim % 8 == 0:
        return cuda_efficient
    return explicit


def cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> Partial:
    mask = None if mask is None else mask.to(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out, lse.float()


def cuda_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scale: float | None) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def cuda_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> Partial:
    bias = None if mask is None else aligned_bias(mask, q, k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def aligned_bias(mask: torch.Tensor, q: torch.Tensor, keys: int) -> torch.Tensor:
    """(B, H, Q, K) with rows that begin at multiples of ALIGN elements."""
    room = -(-keys // ALIGN) * ALIGN
    bias = q.new_zeros(*q.shape[:3], room)[..., :keys]
    return bias.copy_(mask)


def installed_flash() -> Kernel | None:
    """flash-attn 3, then 2, where one is installed."""
    for module in ("flash_attn_interface", "flash_attn"):
        if find_spec(module) is not None:
            return flash_attn(module)
    return None


def flash_attn(module: str) -> Kernel:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scale: float | None) -> Partial:
        from importlib import import_module

        function: Any = import_module(module).flash_attn_func
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # flash-attn has tokens before heads
        out, lse, *_ = function(q, k, v, softmax_scale=scale, return_attn_probs=True)
        return out.transpose(1, 2), lse.float()

    return kernel


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> Partial:
    """In fp32, for what no fused kernel takes. Holds all scores: (B, H, Q, K)."""
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)).exp()
    return (weights @ v.float()).to(q.dtype), lse
