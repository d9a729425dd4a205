"""Call the attention kernels of other packages, where they are installed: yunchang's selection of
them, and flash-attn's own.

None of it is trusted: whether a kernel takes these arguments, and what its lse means, differs from
version to version (``trial``).

Sources: yunchang 0.6.4 (``select_flash_attn_impl``, forward only), flash-attn 2 and 3
(``flash_attn_func``, ``return_attn_probs``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch

from .hosts import SAGE
from .kernels import HOPPER, Ask, Kernel, OutLse, suits_flash

YUNCHANG, FLASH_2, FLASH_3 = "yunchang", "flash_attn", "flash_attn_interface"
NO_WINDOW = (-1, -1)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PackageCall = Callable[[Any, Tensors, float], OutLse]  # a package's function, 3 x (B, tokens, H, D), scale


class Candidate(NamedTuple):
    """A kernel that may be there. ``modules``: of the packages that it needs. ``load`` raises
    whatever they raise. ``stands_for``: as ``Usable`` has it.
    """

    name: str
    modules: tuple[str, ...]
    suits: Callable[[Ask], bool]
    load: Callable[[], Kernel]
    stands_for: str = ""

    @property
    def is_installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.modules)


def tokens_first(function: Any, call: PackageCall) -> Kernel:
    """Return a kernel of a function that has tokens before heads."""

    def kernel(q, k, v, mask: torch.Tensor | None, scale: float | None) -> OutLse:
        qkv = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = call(function, qkv, q.shape[-1] ** -0.5 if scale is None else scale)
        return out.transpose(1, 2), lse.float()

    return kernel


def by_yunchang(function: Any, qkv: Tensors, scale: float) -> OutLse:
    """Its flash-attn kernels take every argument; ``softcap`` is a number for those of today."""
    return function(
        *qkv,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=False,
        window_size=NO_WINDOW,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )[:2]


def one_by_one(function: Any, qkv: Tensors, scale: float) -> OutLse:
    """FlashInfer takes one of a batch."""
    made = [by_yunchang(function, one, scale) for one in zip(*(t.split(1) for t in qkv), strict=True)]
    return torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made])


def by_sage(function: Any, qkv: Tensors, scale: float) -> OutLse:
    """It has names of its own, and swallows others without a word."""
    return function(*qkv, is_causal=False, sm_scale=scale, smooth_k=False)[:2]


def by_flash(function: Any, qkv: Tensors, scale: float) -> OutLse:
    # 3 returned lse always, once
    wanted = {"return_attn_probs": True} if "return_attn_probs" in signature(function).parameters else {}
    return function(*qkv, softmax_scale=scale, **wanted)[:2]


def selected(kind: str, call: PackageCall = by_yunchang) -> Callable[[], Kernel]:
    """Return what loads yunchang's kernel of this name."""

    def load() -> Kernel:
        kernels: Any = import_module(f"{YUNCHANG}.kernels")
        return tokens_first(
            kernels.select_flash_attn_impl(kernels.AttnType.from_string(kind), stage="fwd-only"), call
        )

    return load


def of_flash(module: str) -> Callable[[], Kernel]:
    def load() -> Kernel:
        function: Any = import_module(module).flash_attn_func
        return tokens_first(function, by_flash)

    return load


def suits_hopper(ask: Ask) -> bool:
    return suits_flash(ask) and ask.capability[0] == HOPPER


def suits_sage(ask: Ask) -> bool:
    return suits_flash(ask) and ask.host == SAGE


PACKAGES = (
    Candidate(
        "SageAttention (yunchang)",
        (YUNCHANG, "sageattention"),
        suits_sage,
        selected("sage_auto", by_sage),
        stands_for=SAGE,
    ),
    Candidate("flash-attn 3 (yunchang)", (YUNCHANG, FLASH_3), suits_hopper, selected("fa3")),
    Candidate("flash-attn 3", (FLASH_3,), suits_hopper, of_flash(FLASH_3)),
    Candidate("AITER (yunchang)", (YUNCHANG, "aiter"), suits_flash, selected("aiter")),
    Candidate("flash-attn 2 (yunchang)", (YUNCHANG, FLASH_2), suits_flash, selected("fa")),
    Candidate("flash-attn 2", (FLASH_2,), suits_flash, of_flash(FLASH_2)),
    Candidate(
        "FlashInfer (yunchang)", (YUNCHANG, "flashinfer"), suits_flash, selected("flashinfer", one_by_one)
    ),
)
