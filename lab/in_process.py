"""What a pipeline has to compute: the plain loop over (evaluation, patch) in one process, on the
host's own model, under its own samplers.

A rank count occurs nowhere in it, so what a pipeline computes does not depend on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ..parallel_runtime.client.branch import Branch, SampleCall
from ..parallel_runtime.client.patch_sampling import Patching, Patchwise
from ..parallel_runtime.crossing.block_code import IN_BLOCK, InBlockPatches, put_patches
from ..parallel_runtime.crossing.named_code import options_made
from ..parallel_runtime.crossing.options import crossing_options
from ..parallel_runtime.crossing.rows import Constants
from ..parallel_runtime.families.plan import TokenPlan
from ..parallel_runtime.forward import forward_binder, forward_name, forward_patch
from ..parallel_runtime.patches import Patch
from ..parallel_runtime.refusals import require_plan
from .reference import PatchForward


class InOneProcess:
    """The ``PatchBackend`` that computes at once, in this process."""

    def __init__(self, model: torch.nn.Module, plan: TokenPlan, forward: Callable[..., torch.Tensor]):
        self.method = PatchForward(model, plan)
        self.method.attach()
        self._forward = forward
        self.constants = Constants(groups=1)
        self.beside_ui = False

    def begin_run(self) -> None:
        self.method.end_run()

    def restart_if_reloaded(self) -> bool:
        return False

    def submit(self, call: SampleCall, patch: Patch | None) -> torch.Tensor:
        return self.method.forward(self._forward, call.arguments, call.branch, patch)

    def collect(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket

    def may_start_again(self) -> bool:
        return False

    def tell_of_fresh_workers(self, error: Exception) -> None:
        raise error  # there are none

    def make_room(self) -> bool:
        return False

    def abandon(self) -> None:
        pass


def reference(
    patcher: ModelPatcher, patches: int, warm_up: int, notice: Callable[[str], None] = lambda mode: None
) -> ModelPatcher:
    """A clone that samples in patches. The model object is its own from now on: nothing else may
    sample with it.
    """
    model = patcher.model.diffusion_model
    name = forward_patch(model)
    plan = require_plan(model)
    backend = InOneProcess(model, plan, getattr(model, forward_name(model)))
    sampling = Patchwise(backend, plan.patch_size_of(model), plan, Patching(patches, warm_up), notice)
    bind = forward_binder(model, name)
    of_nodes: list[InBlockPatches] = []  # the run's
    patches_here: list[tuple[str, Callable]] = []

    def begin_run(sampled: ModelPatcher) -> None:
        of_nodes[:] = [InBlockPatches(model, plan, sampled.model_options["transformer_options"])]
        sent = of_nodes[0].objects
        patches_here[:] = (
            put_patches(patcher.model, sent[IN_BLOCK], sampled.load_device).patches if sent else []
        )
        sampling.begin_run()

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = bind(args, kwargs)
        options = arguments.get("transformer_options", {})
        crossed = options_made(crossing_options(options, of_nodes[0] if of_nodes else None), patches_here)
        call = SampleCall({**arguments, "transformer_options": crossed}, Branch.of(options))
        return sampling.output_of(call)

    made = patcher.clone()
    made.add_object_patch(name, forward)
    sampling.attach(made)
    made.add_callback(CallbacksMP.ON_PRE_RUN, begin_run)
    return made
