"""Make the method that a layout asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..attention.kernels import TORCHS, Kernels
from ..comm.mesh import Mesh
from ..comm.shares import stage_speeds
from ..families.plan import TokenPlan
from ..stages import cut, share_out
from .blocks import blocks_of
from .method import Method, Rank
from .pipefusion.stage import PipeFusion
from .usp import SequenceParallel
from .whole_forward import WholeForward


def make_method(
    model: nn.Module,
    plan: TokenPlan,
    mesh: Mesh,
    rank: Rank,
    stages: Sequence[int] = (),
    kernels: Kernels = TORCHS,
    tick: Callable[[], None] | None = None,
) -> Method:
    """Return the method, detached. Under a pipeline the model has this stage's blocks alone from
    now on.

    ``tick`` counts progress in the place of ``rank``, but in a pipeline.
    ``stages``: blocks of each stage; empty shares them out by the stages' speeds. ``kernels``: for
    attention to a part of the keys. Raises Refused or LayoutError if the method cannot run this
    model.
    """
    layout = mesh.layout
    if not plan.blocks:
        WholeForward.check(model, plan, layout)
        return WholeForward(model, mesh.sequence, tick or rank.tick, plan.is_tried)
    if mesh.link is None:
        SequenceParallel.check(model, plan, layout)
        return SequenceParallel(model, plan, mesh.sequence, tick or rank.tick, kernels)
    PipeFusion.check(model, plan, layout)
    alike = [1.0 for _ in blocks_of(model, plan)]
    made = (
        cut(stages, len(alike))
        if stages
        else share_out(alike, layout.stages, stage_speeds(layout, mesh.speeds))
    )
    stage = made[layout.stage(mesh.rank)]
    clocked = not stages  # else they were cut by what was clocked, or by hand
    return PipeFusion(model, plan, stage, mesh.sequence, mesh.link, rank, clocked, kernels)
