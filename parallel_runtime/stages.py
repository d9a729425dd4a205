"""Share out a model's blocks over the stages of a pipeline. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .errors import LayoutError


@dataclass(frozen=True)
class Stage:
    """Blocks [first, end) of ``blocks``, counted over all containers of a plan in their order."""

    first: int
    end: int
    blocks: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.blocks

    def holds(self, block: int) -> bool:
        return self.first <= block < self.end

    @property
    def size(self) -> int:
        return self.end - self.first


def cut(sizes: Sequence[int], blocks: int) -> tuple[Stage, ...]:
    """Cut ``blocks`` into stages of these sizes. Raises LayoutError if they do not add up."""
    if sum(sizes) != blocks:
        written = ",".join(map(str, sizes))
        raise LayoutError(
            f"stages {written} share out {sum(sizes)} blocks, and the model has {blocks}: "
            f"make the numbers add up to {blocks}, or leave stages empty to balance them."
        )
    ends = tuple(accumulate(sizes))
    return tuple(Stage(first, end, blocks) for first, end in pairwise((0, *ends)))


def slowest(costs: Sequence[float], stages: Sequence[Stage], speeds: Sequence[float] = ()) -> float:
    """Return the time of the slowest stage, for which the others wait. ``speeds`` of the stages;
    empty where they are alike.
    """
    return max(
        sum(costs[stage.first : stage.end]) / speed
        for stage, speed in zip(stages, speeds or (1.0,) * len(stages), strict=True)
    )


def require_blocks(stages: int, blocks: int) -> None:
    """Raise LayoutError if there are more stages than blocks."""
    if stages > blocks:
        raise LayoutError(
            f"pipefusion {stages}, and the model has {blocks} block{'s' * (blocks > 1)}: lower the degree."
        )


def share_out(costs: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> tuple[Stage, ...]:
    """Cut blocks of these costs into stages, each with one block at least, so that the slowest is
    as fast as can be. Of equal ways, the one with early borders is taken. ``speeds`` of the stages;
    empty where they are alike.

    Raises LayoutError if there are more stages than blocks.
    """
    require_blocks(stages, len(costs))
    until = (0.0, *accumulate(costs))
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (0, 0): (0.0, ())
    }  # (stages, blocks) -> the slowest stage's cost, and where stages end
    for stage, speed in enumerate(speeds or (1.0,) * stages, 1):
        for end in range(stage, len(costs) - (stages - stage) + 1):
            ways = [
                (
                    max(best[stage - 1, start][0], (until[end] - until[start]) / speed),
                    (*best[stage - 1, start][1], end),
                )
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(ways)
    borders = (0, *best[stages, len(costs)][1])
    return tuple(Stage(first, end, len(costs)) for first, end in pairwise(borders))
