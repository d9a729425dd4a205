"""Tells the evaluations of a run apart: each belongs to a branch, such as the positive cond or one
tile of it.

ComfyUI makes new tensors of a cond for every evaluation, but the cond's own tensors stay the same
objects unless somebody replaces them: by these, its ``Origin``, conditioning is recognised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..crossing.named_code import blocks_left_out
from ..wire.tree import PLAIN

Origins = tuple["Origin", ...]  # of all conds in an evaluation; empty: not known


class Origin:
    """Identifies the tensors and values of one cond, without keeping a tensor alive. A tensor that
    was written to counts as another one, as far as torch counts writes: it does not under
    inference_mode.
    """

    def __init__(self, leaves: Sequence[Any]):
        self._leaves = [
            (weakref.ref(leaf), None if leaf.is_inference() else leaf._version)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]

    def is_same(self, other: Origin) -> bool:
        return len(self._leaves) == len(other._leaves) and all(map(_alike, self._leaves, other._leaves))


@dataclass(frozen=True)
class Branch:
    """Evaluations of one branch differ only in the step: keys, values and conditioning that ranks
    keep of one are for the next one of the same branch, and never for another branch.

    ``conds`` has ComfyUI's id and side of each cond in the batch, such as ``("4f0c 0",)``; ComfyUI
    gives the negative cond that it makes for a region the region's id. ``window`` has the frames of
    a context window. ``left_out`` has the blocks that a node leaves out. ``shapes`` has the
    latents' shapes if the evaluation is cut into patches. ``call`` is 1 for a node's second call of
    the transformer in one step. ``rows`` is [start, end) of the batch if other branches have the
    rest. ``weights`` is the id of the weight patches, which hooks may change from step to step
    within one branch. ``origins`` identify this evaluation's conditioning; empty if they cannot
    tell all of it.
    """

    conds: tuple[str, ...] = ()
    window: tuple[int, ...] = ()
    left_out: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    call: int = 0
    rows: tuple[int, int] | None = None
    weights: str = field(default="", compare=False)
    origins: Origins = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, transformer_options: Mapping[str, Any]) -> Branch:
        """Returns the branch that ComfyUI's options for one evaluation name."""
        window = transformer_options.get("context_window")
        conds = zip(
            transformer_options.get("uuids", ()), transformer_options.get("cond_or_uncond", ()), strict=False
        )
        return cls(
            conds=tuple(f"{cond} {side}" for cond, side in conds),
            window=tuple(window.index_list) if window is not None else (),
            left_out=tuple(blocks_left_out(transformer_options)),
        )


@dataclass(frozen=True, eq=False)
class SampleCall:
    """One call of the transformer by the sampler: its branch, and its arguments by name. The first
    two arguments change with every call.
    """

    arguments: dict[str, Any]
    branch: Branch


Compute = Callable[[Sequence[SampleCall]], list[Any]]  # returns the calls' outputs, in their order


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return type(one) is type(other) and one == other
    (tensor, version), (another, its_version) = one, other
    return tensor() is not None and tensor() is another() and version == its_version


def origins_by_cond(conds: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, Origin]:
    """Returns the origin of each of ComfyUI's conds, by the name that a ``Branch`` has for it. A
    cond that holds more than tensors and plain data has no origin, nor have two conds of one name.
    """
    made_of: dict[str, list[Any]] = {}
    for side, of_side in enumerate(conds):
        for cond in of_side or ():
            parts = {name: getattr(one, "cond", one) for name, one in cond.get("model_conds", {}).items()}
            name, leaves = f"{cond.get('uuid')} {side}", tree_leaves([cond.get("area"), parts])
            made_of[name] = [object()] if name in made_of else [*parts, *leaves]
    return {
        name: Origin(leaves)
        for name, leaves in made_of.items()
        if all(isinstance(leaf, (torch.Tensor, torch.dtype, *PLAIN)) for leaf in leaves)
    }
