"""How much memory ranks may take on each device, as far as that is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import comfy.model_management
import torch

from ..parallel_runtime.client.free_gpu import free_on
from ..parallel_runtime.planner.prediction import RESERVED
from ..parallel_runtime.wire.messages import Memory
from ..pool.devices import Placement


def room_on_devices(live: Iterable[tuple[Placement, Sequence[Memory]]]) -> dict[str, int]:
    """Return the bytes of each device that ranks may take: what is free, what models there would
    make room with, and for each rank that is up what the planner sets aside for one. ``live``:
    pools that are up, with each rank's memory. A GPU without a rank, on which ComfyUI does not
    compute either, is left out: asking would take memory there.
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
    """Return the bytes of ComfyUI's own models there. Those of pools are the ranks'."""
    loaded = [
        one
        for one in comfy.model_management.current_loaded_models
        if one.device == device and one.model is not None
    ]
    return int(sum(one.model_loaded_memory() for one in loaded if not hasattr(one.model, "remote")))
