"""A released model without its weights, and what ComfyUI would call it with: for the dry run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..families.sample import Released, Sample
from .forward import PREFIX, forward_binder, forward_patch

Extent = tuple[int, int, int]  # width and height in pixels, and frames


class Called(BaseException):
    """ComfyUI has called the transformer. Not an Exception: host code catches those."""


def empty_model(sample: Sample, released: Released, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the released model's BaseModel. Call it where tensors have no content: a weight is as
    large as it is.
    """
    return sample.form.base_model({**sample.form.config(released.size), **released.changes}, dtype, device)


def latent_shape(model: Any, extent: Extent) -> tuple[int, ...]:
    """Return the shape of the latent of one image or video, by ComfyUI's latent format."""
    width, height, frames = extent
    form = model.latent_format
    depth = ((frames - 1) // form.temporal_downscale_ratio + 1,) if form.latent_dimensions == 3 else ()
    return (1, form.latent_channels, *depth, height // form.spacial_downscale_ratio, width // form.spacial_downscale_ratio)


def arguments_of(model: Any, sample: Sample, released: Released, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return the arguments of the transformer's forward in one evaluation of a latent (B, C, ...),
    on ``device``, as a rank has them.
    """
    latent = torch.zeros(shape, device=device)
    prompt = {
        "cross_attn": torch.zeros(1, released.text, released.size.text_dim),
        "pooled_output": torch.zeros(1, released.size.pooled_dim),
    }
    prompt |= sample.extras(torch.zeros(shape))
    made = model.extra_conds(device=device, noise=latent, latent_image=latent, width=0, height=0, prompt_type="positive", **prompt)
    conds = {name: cond.process_cond(batch_size=1, area=None).cond for name, cond in made.items()}
    found: dict[str, Any] = {}
    name = forward_patch(model.diffusion_model)
    bind = forward_binder(model.diffusion_model, name)

    def called(*args: Any, **kwargs: Any) -> None:
        found.update(bind(args, kwargs))
        raise Called

    attribute = name.removeprefix(PREFIX)
    setattr(model.diffusion_model, attribute, called)
    try:
        model.apply_model(latent, torch.ones(1, device=device), transformer_options={"cond_or_uncond": [0]}, **conds)
    except Called:
        pass
    finally:
        delattr(model.diffusion_model, attribute)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), found)
