"""Merge attention over two sets of keys, exactly, by the log-sum-exp (lse) of their scores.

Legend: B batch, H heads, Q query tokens, D head dim.
Source: FlashAttention (arXiv 2205.14135, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over so many of the keys, (B, H, Q, D), and their lse, (B, H, Q) in fp32. Of merged
    parts exp(scores) add up to ``weight * exp(lse)``, and ``keys`` is 1.

    Those are two numbers because beside a level of -1e9 fp32 keeps nothing of log(weight).
    """

    out: torch.Tensor
    lse: torch.Tensor
    keys: float = 1.0
    weight: torch.Tensor | None = None

    @property
    def level(self) -> torch.Tensor:
        return self.lse if self.keys == 1 else self.lse - math.log(self.keys)

    def share(self, own: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return its sum of exp(scores), in units of exp(level); ``own`` is its level."""
        return (self.keys if self.weight is None else self.weight) * (own - level).exp()


Merge = Callable[[Partial, Partial], Partial]


def merge_partials(first: Partial, second: Partial) -> Partial:
    """Return the attention over both sets of keys, in fp32.

    A row that one large number closes everywhere (-1e9, the smallest of the dtype) comes out as in
    one softmax over all keys: their mean. Only a row whose largest score is such a number, while
    other keys are closed by a larger one or by -inf, is inexact: a kernel's lse does not tell how
    many keys have the largest score, so parts weigh by all their keys.
    """
    levels = first.level, second.level
    level = torch.maximum(*levels)
    looks_at_nothing = level == -math.inf  # yet: 0 / 1
    units = torch.where(looks_at_nothing, 0.0, level)
    a, b = (part.share(own, units) for part, own in zip((first, second), levels, strict=True))
    weight = torch.where(looks_at_nothing, 1.0, a + b)
    out = first.out.float() * (a / weight).unsqueeze(-1) + second.out.float() * (b / weight).unsqueeze(-1)
    return Partial(out, level, weight=weight)
