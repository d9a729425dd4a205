"""What is to be sampled: a model at one size, how often, and how patches are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout
from .figures import Whole
from .keeping import Kept


@dataclass(frozen=True, kw_only=True)
class Job:
    """``whole``: one evaluation of one branch at batch 1. ``evaluations`` of a run; ``branches`` in
    each, 2 with CFG. Of a pipeline: ``patches``, 0 for one more than stages, and ``warm_up``
    evaluations that are whole. ``text_in_each_patch``: other implementations compute the text anew
    with each patch; this one computes it once. ``is_compiled``: kernels between products are fused
    with them. ``keeps``: the ways in which ranks may keep weights.
    """

    whole: Whole
    evaluations: int = 28
    branches: int = 1
    batch: int = 1
    patches: int = 0
    warm_up: int = 1
    text_in_each_patch: bool = False
    is_compiled: bool = False
    keeps: tuple[Kept, ...] = ("whole", "sharded", "offloaded")

    def patches_of(self, stages: int) -> int:
        return 1 if stages == 1 else self.patches or stages + 1

    def share_of_patch(self, patches: int) -> float:
        """Return the part of an evaluation's tokens that a patch has."""
        text = sum(self.whole.tokens.values()) - max(self.whole.tokens.values())
        more = text * (patches - 1) if self.text_in_each_patch else 0
        return (1 + more / sum(self.whole.tokens.values())) / patches

    def turns(self, layout: Layout) -> int:
        """Return how many evaluations, of one branch and image, the busiest group of a layout
        computes in turn.
        """
        return -(-self.branches // layout.cfg) * -(-self.batch // layout.data)

    def even_turns(self, layout: Layout) -> float:
        return self.branches / layout.cfg * self.batch / layout.data
