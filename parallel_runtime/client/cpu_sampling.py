"""Move a run's sampler from the UI's GPU to the CPU if a rank computes on that GPU: each of the
sampler's few sums on a latent would wait for its turn there, and the pipeline for the sampler.

Noise is drawn on the device on which ComfyUI draws it, so a sampler that draws noise on the GPU
stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")
# Of ComfyUI's samplers, those that draw no random number on the latent's device
DRAW_NOTHING_THERE = frozenset((
    "deis", "dpm_2", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_heun",
    "dpmpp_3m_sde", "dpmpp_sde", "euler", "euler_cfg_pp", "exp_heun_2_x0", "gradient_estimation",
    "gradient_estimation_cfg_pp", "heun", "ipndm", "ipndm_v", "lms", "unipc", "unipc_bh2",
))  # fmt: skip
CHURN = "s_churn"  # an option by which some of them do


def draws_there(sampler: Any) -> str:
    """Returns the name of a sampler that may draw random numbers on the latent's device, else an
    empty one.
    """
    name = sampler.sampler_function.__name__.removeprefix("sample_").removesuffix("_function")
    return "" if name in DRAW_NOTHING_THERE and not sampler.extra_options.get(CHURN) else name


def on_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(CPU), value)


def guider_on_cpu(guider: Any) -> Any:
    """Makes a copy of ComfyUI's own guider whose conds are on the CPU."""
    moved = copy(guider)
    moved.conds = {
        side: [
            {
                **cond,
                "model_conds": {
                    name: value._copy_with(on_cpu(value.cond)) for name, value in cond["model_conds"].items()
                },
            }
            for cond in conds or ()
        ]
        for side, conds in guider.conds.items()
    }
    return moved


def arguments_on_cpu(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sampler's ``extra_args`` with the tensors of ComfyUI's options on the CPU."""
    options = extra_args["model_options"]
    of_model = {
        name: value.to(CPU) if isinstance(value, torch.Tensor) else value
        for name, value in options.get("transformer_options", {}).items()
    }
    return {**extra_args, "model_options": {**options, "transformer_options": of_model}}


def on_device(callback: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Returns a callback that gets its latents on ``device``, because decoders of previews may be
    there.
    """
    return lambda step, x0, x, total: callback(step, x0.to(device), x.to(device), total)
