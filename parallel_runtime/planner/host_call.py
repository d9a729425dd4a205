"""The arguments with which ComfyUI calls a transformer. It replaces functions of ComfyUI: no
process that serves imports it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from ..forward import PREFIX, forward_binder, forward_patch

PLENTY = 1 << 50  # bytes
SPACIAL = 8  # as ComfyUI has it for all models where a cond tells no size


class Called(BaseException):
    """ComfyUI has called the transformer. Not an Exception: host code catches those."""


@contextmanager
def kernels_that_count() -> Iterator[Callable[..., Any]]:
    """Have ComfyUI believe in endless memory, by which its own attention chooses how to go on.
    Return an attention that the dry run can count, for others, which may call kernels of packages.
    """
    import comfy.ldm.modules.attention
    import comfy.model_management

    def free_memory(_device: Any = None, torch_free_too: bool = False) -> Any:
        return (PLENTY, PLENTY) if torch_free_too else PLENTY

    with patch.object(comfy.model_management, "get_free_memory", free_memory):
        yield comfy.ldm.modules.attention.attention_pytorch


def forget_tensors() -> None:
    """Empty the caches of functions of ComfyUI's models. After a shape-only run they may hold
    tensors without content, which the next computation in this process would get.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("comfy.ldm."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def transformer_conds(
    model: Any, prompt: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> dict[str, Any]:
    """Return the transformer's arguments that ComfyUI makes from a prompt."""
    latent = packed(shapes, device)
    size = {"width": shapes[0][-1] * SPACIAL, "height": shapes[0][-2] * SPACIAL, "prompt_type": "positive"}
    together = {"latent_shapes": [torch.Size(shape) for shape in shapes]} if len(shapes) > 1 else {}
    made = model.extra_conds(
        device=device, noise=latent, latent_image=latent, **{**size, **together, **prompt}
    )
    return {name: cond.process_cond(batch_size=1, area=None).cond for name, cond in made.items()}


def packed(shapes: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Return an empty latent; several as the one that ComfyUI's samplers have of them."""
    import comfy.utils

    latents = [torch.zeros(shape, device=device) for shape in shapes]
    return latents[0] if len(latents) == 1 else comfy.utils.pack_latents(latents)[0]


def called_with(
    model: Any, conds: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> dict[str, Any]:
    """Return the arguments with which ComfyUI calls the transformer for the ``transformer_conds``
    of a prompt.
    """
    latent = packed(shapes, device)
    conds = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(conds))
    found: dict[str, Any] = {}
    name = forward_patch(model.diffusion_model)
    bind = forward_binder(model.diffusion_model, name)

    def called(*args: Any, **kwargs: Any) -> None:
        found.update(bind(args, kwargs))
        raise Called

    attribute = name.removeprefix(PREFIX)
    setattr(model.diffusion_model, attribute, called)
    sigmas = torch.ones(1, device=device)
    options = {"cond_or_uncond": [0], "sigmas": sigmas, "sample_sigmas": sigmas}
    try:
        model.apply_model(latent, torch.ones(1, device=device), transformer_options=options, **conds)
    except Called:
        pass
    finally:
        delattr(model.diffusion_model, attribute)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), found)
