"""Room on the UI's GPU, where the first rank often is too, from models that ComfyUI has left there.

ComfyUI keeps free what an evaluation computes (PREPARE_SAMPLING), and knows nothing of what stages
keep: with a text encoder beside them they may find none. Read: comfy/model_management.py,
comfy/samplers.py, comfy/sampler_helpers.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import comfy.model_management as mm
import torch

from ..client.separable import known_guider
from ..wire.segment import mib

log = logging.getLogger("pipemesh")
ALL_OF_IT = 1e30  # bytes; as the host itself writes it


def host_makes_room(guider: Any) -> bool:
    """Inside a run of ``guider``: unloads from the UI's GPU what this run does not use. False:
    there is not more room than before.

    So it is where no rank computes on that GPU, on a CPU, and for guiders that may use models which
    nobody knows of. Models of wrappers that do not tell of them (``models()``) are not known to the
    host either.
    """
    patcher = guider.model_patcher
    device, remote = patcher.load_device, getattr(patcher, "remote", None)
    if device.type != "cuda" or remote is None or not remote.holds_ui_device or not known_guider(guider):
        return False
    before = free_on(device)
    used = list(used_by(guider))
    mm.free_memory(ALL_OF_IT, device, [held for held in mm.current_loaded_models if is_one_of(held.model, used)])
    mm.soft_empty_cache()
    freed = free_on(device) - before
    if freed > 0:
        log.info("[PipeMesh] ComfyUI unloaded what this run does not use, %s, to make room on %s.", mib(freed), device)
    return freed > 0


def free_on(device: torch.device) -> int:
    """As every process sees it: what the UI's torch keeps for itself is not."""
    return torch.cuda.mem_get_info(device)[0]


def used_by(guider: Any) -> Iterator[Any]:
    """Patchers of the models that a known guider's run uses beside the one that is sampled."""
    yield from guider.loaded_models
    for patcher in (guider.model_patcher, *guider.loaded_models):
        if hasattr(patcher, "model_patches_models"):
            yield from patcher.model_patches_models()


def is_one_of(patcher: Any, used: list[Any]) -> bool:
    """Models of pools are: what a pool can do without, it has released before."""
    return patcher is not None and (hasattr(patcher, "remote") or any(patcher.is_clone(other) for other in used))
