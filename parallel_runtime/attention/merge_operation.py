"""Merge two parts of an attention by one of torch's operations, ``pipemesh::merge``: one kernel on
a GPU (``fused_merge``), and the about twenty operations of ``merge_partials`` on any other device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .merging import Partial, merge_partials

OPERATION = "merge"
SCHEMA = ", ".join(f"Tensor {one}, Tensor {one}_lse, float {one}_keys, Tensor? {one}_weight" for one in "ab")


def in_one(first: Partial, second: Partial) -> Partial:
    """Merge by one operation."""
    out, level, weight = operation()(*first, *second)
    return Partial(out, level, weight=weight)


@cache
def operation() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the operation, which torch keeps per process."""
    return Operation().call


class Operation:
    """Torch's ``pipemesh::merge``, for as long as this object lives: two ``Partial``, field by
    field, -> (out, level, weight). A device without a kernel of its own, and a shape-only run,
    compute it by the operations of ``merge_partials``.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("pipemesh", "FRAGMENT")
        self._library.define(f"{OPERATION}({SCHEMA}) -> (Tensor, Tensor, Tensor)")
        self._library.impl(OPERATION, self._one_by_one, "CompositeImplicitAutograd")
        self._library.impl(OPERATION, self._on_a_gpu, "CUDA")
        self._torchs = torch.ops.pipemesh.merge.default

    def call(self, *fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._torchs(*fields)

    def _one_by_one(self, *fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = merge_partials(*halves(fields))
        assert made.weight is not None
        return made.out, made.lse, made.weight

    def _on_a_gpu(self, *fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from .fused_merge import fused  # Triton, which other devices need not have

        return fused(*halves(fields))


def halves(fields: tuple) -> tuple[Partial, Partial]:
    return Partial(*fields[: len(fields) // 2]), Partial(*fields[len(fields) // 2 :])
