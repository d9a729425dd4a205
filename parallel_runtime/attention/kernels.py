"""Compute attention over a part of the keys, and the log-sum-exp (lse) of their scores, by which
``merging`` puts parts together.

Every kernel holds scores and their sums in fp32 whatever q's dtype, so a host that asks for that
precision has it. A query that may look at none of the keys given has out = 0 and lse = -inf: it
does not count in a merge.

Here are torch's own kernels; ``trial`` finds out which of them a device can be trusted with.

Legend: B batch, H heads, Q query tokens, K key tokens, D head dim; ``lse`` is (B, H, Q) in fp32.
Source: torch 2.11's aten kernels (native_functions.yaml).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import ModelError
from .hosts import NO_PARTS
from .merging import Merge, Partial, merge_partials

ALIGN = 16  # the efficient kernel wants rows of its bias to begin at multiples of 16 elements

AMPERE, HOPPER = 8, 9  # major compute capabilities
CUDNN_DIMS = (64, 128)  # cuDNN takes others by its version; these are tried

OutLse = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "float | None"], OutLse]


class Ask(NamedTuple):
    """Describes an attention to a kernel. ``capability`` is the CUDA device's."""

    device: str
    dtype: torch.dtype
    dim: int
    is_masked: bool
    capability: tuple[int, int] = (0, 0)

    @property
    def is_half(self) -> bool:
        """Whether it is in a half precision that the device computes in."""
        return self.dtype == torch.float16 or (self.dtype == torch.bfloat16 and self.capability[0] >= AMPERE)


def suits_flash(ask: Ask) -> bool:
    on_gpu = ask.device == "cuda" and ask.capability[0] >= AMPERE
    return on_gpu and ask.is_half and not ask.is_masked and ask.dim % 8 == 0 and ask.dim <= 256


def suits_cudnn(ask: Ask) -> bool:
    return suits_flash(ask) and ask.capability[0] >= HOPPER and ask.dim in CUDNN_DIMS


def suits_efficient(ask: Ask) -> bool:
    return ask.device == "cuda" and ask.dim % 8 == 0 and (ask.is_half or ask.dtype == torch.float32)


class Usable(NamedTuple):
    """A kernel under the name that users read, and the attentions that it suits."""

    name: str
    kernel: Kernel
    suits: Callable[[Ask], bool]


class Kernels(NamedTuple):
    """The kernels of a rank: the first of ``order`` that suits is taken, and the last suits
    all. ``refused``: a sentence for each one that was found wrong. ``merge``: what
    puts parts together.
    """

    order: tuple[Usable, ...]
    refused: tuple[str, ...] = ()
    merge: Merge = merge_partials

    def choose(self, ask: Ask) -> Usable:
        return next(usable for usable in self.order if usable.suits(ask))


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None = None,
    kernels: Kernels | None = None,
    host: str = "",
) -> Partial:
    """Attend over some of the keys, by the first of ``kernels`` (default: torch's) that suits.
    Return out (B, H, Q, D) in q's dtype, lse (B, H, Q) in fp32, and the number of keys.

    ``q`` is (B, H, Q, D), ``k`` and ``v`` are (B, H, K, D). ``mask`` is additive or boolean: (Q,
    K), (B, Q, K) or (B, 1 or H, 1 or Q, K). ``host`` names the function that the attention stands
    for, as ``hosts.inexact`` returns it. Raises ModelError unless that is exact attention.
    """
    if host:
        raise ModelError(
            f"This MODEL attends by {host}, and no kernel of it here returns the log-sum-exp that ranks need"
            f" to merge parts: {NO_PARTS}."
        )
    batch, heads, queries, _ = q.shape
    # Torch's CPU kernel dies of an empty dimension
    if queries == 0 or k.shape[2] == 0 or heads == 0 or batch == 0:
        return Partial(q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32))
    if mask is not None and mask.ndim == 3:  # hosts' (B, Q, K)
        mask = mask.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    mask = None if mask is None else mask.to(q.dtype)
    ask = Ask(q.device.type, q.dtype, q.shape[-1], mask is not None, capability_of(q.device))
    out, lse = (kernels or TORCHS).choose(ask).kernel(q, k, v, mask, scale)
    if mask is not None:
        # Kernels differ in what they return for queries that may look at no key
        blind = (mask == -math.inf).all(-1)
        out = torch.where(blind.unsqueeze(-1), 0.0, out).to(out.dtype)
        lse = torch.where(blind, -math.inf, lse)
    return Partial(out, lse, float(k.shape[2]))


def capability_of(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    # AMD's GPUs have version numbers of their own: all that ROCm's torch runs on count as Ampere.
    return (AMPERE, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def cpu_flash(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return out, lse.float()


def cuda_flash(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def cuda_cudnn(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, scale=scale)
    return out, lse.reshape(q.shape[:3]).float()


def cuda_efficient(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    bias = None if mask is None else aligned_bias(mask, q, k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return out, lse[..., : q.shape[2]].float()


def aligned_bias(mask: torch.Tensor, q: torch.Tensor, keys: int) -> torch.Tensor:
    """Copy the mask to (B, H, Q, K) with rows that begin at multiples of ALIGN elements. Dimensions
    of size 1 in the mask are held once.
    """
    bias = q.new_empty(*mask.shape[:-1], -(-keys // ALIGN) * ALIGN)[..., :keys]
    return bias.copy_(mask).expand(*q.shape[:3], keys)


def explicit(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
    """Attend in fp32 if no fused kernel can. Holds all scores (B, H, Q, K)."""
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)).exp()
    return (weights @ v.float()).to(q.dtype), lse


CPU_FLASH = Usable("torch's flash attention for CPUs", cpu_flash, lambda ask: ask.device == "cpu")
CUDA_FLASH = Usable("torch's flash attention", cuda_flash, suits_flash)
CUDA_CUDNN = Usable("cuDNN's attention", cuda_cudnn, suits_cudnn)
CUDA_EFFICIENT = Usable("torch's efficient attention", cuda_efficient, suits_efficient)
EXPLICIT = Usable("attention without a fused kernel", explicit, lambda ask: True)
TORCHS = Kernels((CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT, EXPLICIT))
TO_TRY = (CPU_FLASH, CUDA_CUDNN, *TORCHS.order[1:])  # cuDNN's lse is its version's: none is used untried
