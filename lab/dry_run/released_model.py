"""A released model without its weights, for a dry run at a usual request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...parallel_runtime.families import plan_for
from ...parallel_runtime.families.sample import Extent, Released, Sample
from ...parallel_runtime.planner.dry_device import DEVICE, DeviceCounts, computing_dry, is_on_device
from ...parallel_runtime.planner.dry_run import count_evaluation
from ...parallel_runtime.planner.evaluation_count import Whole
from ...parallel_runtime.planner.fake_mode import QuickFakeMode
from ...parallel_runtime.planner.host_call import called_with, forget_tensors, transformer_conds

CPU = torch.device("cpu")


class DryModel:
    """A released model to run dry, in bf16, at batch 1. ``extent``: the request's, where it is not
    the usual one. ``shape`` of its latent, or of the first of several.
    """

    def __init__(self, sample: Sample, released: Released, extent: Extent | None = None):
        self.released = released
        self.extent = extent or released.extent
        self.mode = QuickFakeMode()
        forget_tensors()  # of another mode
        with computing_dry(self.mode, DeviceCounts()):
            self.model = on_device(empty_model(sample, released, torch.bfloat16, DEVICE))
        with computing_dry(self.mode, DeviceCounts()):
            shapes = latent_shapes(self.model, released, self.extent)
            self.arguments = arguments_of(self.model, sample, released, shapes, DEVICE)
        self.shape = shapes[0]
        plan = plan_for(type(self.model.diffusion_model))
        assert plan is not None, f"{released.name} has no plan"
        self.plan = plan

    def whole(self) -> Whole:
        """Run the model on one device as ComfyUI does."""
        return count_evaluation(
            self.model, self.plan, self.arguments, self.mode, chosen=1 / self.released.cut.experts
        )


def on_device(model: Any) -> Any:
    """Move tensors to the device that ComfyUI makes without asking where."""
    for module in model.diffusion_model.modules():
        for tensors in (module._parameters, module._buffers):
            found = {
                name: tensor.to(DEVICE)
                for name, tensor in tensors.items()
                if tensor is not None and not is_on_device(tensor)
            }
            cast("dict[str, Any]", tensors).update(found)
    return model


def empty_model(sample: Sample, released: Released, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the released model's BaseModel. Call it where tensors have no content: a weight is as
    large as it is.
    """
    return sample.form.base_model({**sample.form.config(released.size), **released.changes}, dtype, device)


def latent_shapes(model: Any, released: Released, extent: Extent) -> Sequence[tuple[int, ...]]:
    """Return the shapes of the latents of one image or video: one by ComfyUI's latent format, or
    those that the released model samples together, such as video and audio.
    """
    if released.latents is not None:
        return released.latents(extent)
    width, height, frames = extent
    form = model.latent_format
    depth = ((frames - 1) // form.temporal_downscale_ratio + 1,) if form.latent_dimensions == 3 else ()
    sides = (side // form.spacial_downscale_ratio for side in (height, width))
    return [(1, form.latent_channels, *depth, *sides)]


def arguments_of(
    model: Any, sample: Sample, released: Released, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> dict[str, Any]:
    """Return the arguments of the transformer's forward in one evaluation of latents (B, C, ...),
    on ``device``, as a rank has them.
    """
    at = CPU if released.reads_prompt else device
    with _disable_current_modes() if released.reads_prompt else nullcontext():
        extras = sample.extras if released.extras is None else released.extras
        prompt = {
            "cross_attn": torch.zeros(1, released.text, released.size.text_dim),
            "pooled_output": torch.zeros(1, released.size.pooled_dim),
            **extras(torch.zeros(shapes[0])),
        }
        conds = transformer_conds(model, prompt, shapes, at)
    return called_with(model, conds, shapes, device)
