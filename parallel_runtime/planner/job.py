"""Describes a sampling to the planner: a model at one size, the number of evaluations, and how they
are cut into patches.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout
from .evaluation_count import Whole
from .ways import Kept


@dataclass(frozen=True, kw_only=True)
class Job:
    """``whole``: one evaluation of one branch at batch 1. ``evaluations`` of a run; ``branches`` in
    each, 2 with CFG. Of a pipeline: ``patches``, 0 for one more than stages, and ``warm_up``
    evaluations that are whole. ``keeps``: the ways in which ranks may keep weights. ``merges``:
    whether parts of its attention can be merged, as a ring does. ``together``: the batch is one
    video, whose frames are not shared out. ``replays``: ranks replay CUDA graphs of its evaluations
    if they have whole weights and no stages.
    """

    whole: Whole
    evaluations: int = 28
    branches: int = 1
    batch: int = 1
    patches: int = 0
    warm_up: int = 1
    keeps: tuple[Kept, ...] = ("whole", "sharded", "offloaded")
    merges: bool = True
    together: bool = False
    replays: bool = False

    def patches_of(self, stages: int) -> int:
        return 1 if stages == 1 else self.patches or stages + 1

    def share_of_patch(self, patches: int) -> float:
        """Return the part of an evaluation's tokens that a patch has: the text is in one alone."""
        return 1 / patches

    def even_turns(self, layout: Layout) -> float:
        """Return how many evaluations, of one branch and image, a group computes in the mean."""
        return self.branches / layout.cfg * self.batch / layout.data
