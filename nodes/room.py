"""Finds how many bytes ranks may take on each device whose free memory is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import comfy.model_management
import torch

from ..parallel_runtime.client.free_gpu import free_on
from ..parallel_runtime.planner.prediction import RESERVED
from ..parallel_runtime.wire.messages import Memory
from ..pool.devices import Placement


def room_on_devices(live: Iterable[tuple[Placement, Sequence[Memory]]]) -> dict[str, int]:
    """Return, for each device, the bytes that ranks may take: its free bytes, the bytes of models
    there, which would make room, and the planner's reserve for each rank that is up. ``live`` pairs
    the placement of each live pool with the memory of its ranks. A GPU that has no rank and is not
    ComfyUI's own is left out, because asking it would take memory there.
    """
    free: dict[str, int] = {}
    held: dict[str, int] = {}
    for placement, memory in live:
        for device, one in zip(placement.devices, memory, strict=False):
            free[device.name] = one.free
            held[device.name] = held.get(device.name, 0) + one.model + one.sets + RESERVED
    own = comfy.model_management.get_torch_device()
    if own.type == "cuda":
        free[str(own)] = free_on(own) + torch.cuda.memory_reserved(own) - torch.cuda.memory_allocated(own)
        held[str(own)] = held.get(str(own), 0) + held_by_comfyui(own)
    return {name: nbytes + held.get(name, 0) for name, nbytes in free.items()}


def held_by_comfyui(device: torch.device) -> int:
    """Return the bytes of ComfyUI's own models on the device, without models of pools, which ranks
    hold.
    """
    loaded = [
        one
        for one in comfy.model_management.current_loaded_models
        if one.device == device and one.model is not None
    ]
    return int(sum(one.model_loaded_memory() for one in loaded if not hasattr(one.model, "remote")))
