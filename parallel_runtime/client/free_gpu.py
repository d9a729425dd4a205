"""Unload models that ComfyUI left on the UI's GPU, which the first rank often uses too.

ComfyUI keeps memory free for an evaluation (PREPARE_SAMPLING), and does not know the memory that
stages keep: beside a text encoder they may not fit. Read: comfy/model_management.py,
comfy/samplers.py, comfy/sampler_helpers.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import comfy.model_management as mm
import torch

from ..wire.segment import mib

log = logging.getLogger("pipemesh")
ALL_OF_IT = 1e30  # bytes; as ComfyUI itself writes it


def unload_unused(guider: Any, *, is_known: bool) -> bool:
    """Unloads, inside a run of ``guider``, the models that the run does not use from the UI's GPU.
    Returns True if more is free than before.

    ``is_known``: every model that such a guider uses can be asked for (``used_by``). If it is
    false, or no rank computes on that GPU, or ComfyUI computes on the CPU, nothing is unloaded.
    Models of wrappers without ``models()`` are not known to ComfyUI either.
    """
    patcher = guider.model_patcher
    device, remote = patcher.load_device, getattr(patcher, "remote", None)
    if device.type != "cuda" or remote is None or not remote.holds_ui_device or not is_known:
        return False
    used = list(used_by(guider))
    stays = [held for held in mm.current_loaded_models if is_one_of(held.model, used)]
    if all(held in stays or held.device != device for held in mm.current_loaded_models):
        return False
    before = free_on(device)
    mm.free_memory(ALL_OF_IT, device, stays)
    mm.soft_empty_cache()
    freed = free_on(device) - before
    if freed > 0:
        log.info(
            "[PipeMesh] ComfyUI unloaded %s, which this run does not use, to make room on %s.",
            mib(freed),
            device,
        )
    return freed > 0


def free_on(device: torch.device) -> int:
    """Returns the free bytes as every process sees them: memory that the UI's torch caches does not
    count as free.
    """
    return torch.cuda.mem_get_info(device)[0]


def used_by(guider: Any) -> Iterator[Any]:
    """Patchers of the models that a known guider's run uses beside the sampled one."""
    yield from guider.loaded_models
    for patcher in (guider.model_patcher, *guider.loaded_models):
        if hasattr(patcher, "model_patches_models"):
            yield from patcher.model_patches_models()


def is_one_of(patcher: Any, used: list[Any]) -> bool:
    """True for a clone of one of ``used``, and for models of pools: a pool has released all that it
    can before ComfyUI is asked.
    """
    return patcher is not None and (
        hasattr(patcher, "remote") or any(patcher.is_clone(other) for other in used)
    )
