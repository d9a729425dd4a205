"""VAEs and upscale models that a pool computes: by hand, and for auto mode."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch

from ..parallel_runtime.client.remote_upscaler import UpscalerInPool, why_not_upscaled
from ..parallel_runtime.client.remote_vae import parallelize_vae, stock_of, why_by_stock
from ..parallel_runtime.errors import LayoutError, Refused
from ..pool.devices import Placement
from .local_devices import own_device, why_one_gpu
from .notices import OF_A_VAE
from .settings import Choice

if TYPE_CHECKING:
    from .runtime import Runtime


def parallelized(runtime: Runtime, vae: Any, choice: Choice | None) -> Any:
    """Make a copy of ``vae`` that the pool of this choice decodes and encodes, or without one the
    pool that samples, if there is one, or all devices. A VAE that cannot be cut, or that has one
    device, is itself, and a notice says so. Raises LayoutError.
    """
    if runtime.fault:
        raise LayoutError(runtime.fault)
    vae, choice = stock_of(vae), choice or runtime.default_choice()
    if why := why_on_one(vae, choice.placement):
        runtime.notices.tell(f"{OF_A_VAE}: {why.removesuffix('.')}.", stays=True)
        return vae
    return parallelize_vae(vae, partial(runtime.pool_for, choice), holds_own_device(choice.placement))


def lent(runtime: Runtime, vae: Any, choice: Choice, placement: Placement) -> Any:
    """Make a copy of ``vae`` that the live pool of a choice computes for as long as ``vae`` lives.
    Raises Refused if it cannot.
    """
    if why := why_on_one(vae, placement):
        raise Refused(f"{why}.")
    return parallelize_vae(vae, partial(runtime.pool_for, choice), holds_own_device(placement), keeps=False)


def lent_upscaler(runtime: Runtime, upscaler: Any, choice: Choice, placement: Placement) -> UpscalerInPool:
    """Make the substitute of an upscale model in the live pool of a choice, which lasts as long as
    the upscale model. Raises Refused if ranks cannot compute it.
    """
    if why := why_on_one_device(upscaler.patcher.load_device, placement) or why_not_upscaled(upscaler):
        raise Refused(f"{why}.")
    holds_own = holds_own_device(placement)
    return UpscalerInPool(weakref.ref(upscaler), partial(runtime.pool_for, choice), holds_own)


def holds_own_device(placement: Placement) -> bool:
    return own_device() in [device.name for device in placement.devices]


def why_on_one(vae: Any, placement: Placement) -> str:
    """Say why ComfyUI itself decodes and encodes, and no pool on this placement; empty if a pool
    can.
    """
    return why_on_one_device(vae.device, placement) or why_by_stock(vae)


def why_on_one_device(own: torch.device, placement: Placement) -> str:
    """Say why no pool on this placement takes over work from ComfyUI's ``own`` device; empty if one
    can.
    """
    return (
        why_one_gpu()
        if placement.is_one_gpu
        else "the pool has ranks on other machines"
        if placement.other_machines
        else "stages of a pipeline hold parts of models"
        if placement.layout.stages > 1
        else "it stays on the CPU, as --cpu-vae says"
        if own.type == "cpu" and placement.devices[0].is_gpu
        else f"a node has put it on {own}"
        if own != comfy.model_management.get_torch_device()
        else ""
    )
