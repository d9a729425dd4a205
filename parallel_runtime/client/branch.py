"""What tells the evaluations of a run apart: each belongs to a branch, such as the positive cond or
one tile of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..crossing.by_name import blocks_left_out


@dataclass(frozen=True)
class Branch:
    """Evaluations of one branch are alike but for the step: what ranks keep of one (keys, values,
    conditioning) is for the next one of the same branch, and never for another branch.

    ``conds``: ComfyUI's id and side of each cond in the batch, such as ``("4f0c 0",)``. ComfyUI
    gives the negative cond that it makes for a region the region's id. ``window``: the frames of a
    context window. ``left_out``: blocks that a node leaves out. ``shapes``: of the latents, where
    the evaluation is cut into patches. ``call``: 1 for a node's second call of the transformer in
    one step. ``rows``: [start, end) of the batch, where others have the rest. ``weights``: the id
    of the weight patches, which hooks may change from step to step within one branch.
    """

    conds: tuple[str, ...] = ()
    window: tuple[int, ...] = ()
    left_out: tuple[Any, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    call: int = 0
    rows: tuple[int, int] | None = None
    weights: str = field(default="", compare=False)

    @classmethod
    def of(cls, transformer_options: Mapping[str, Any]) -> Branch:
        """Returns the branch that ComfyUI's options for one evaluation tell of."""
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
    """One call of the transformer by the sampler: its arguments by name, the first two of which
    change with every call, and its branch.
    """

    arguments: dict[str, Any]
    branch: Branch
