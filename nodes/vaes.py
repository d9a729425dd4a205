"""VAEs that a pool computes: by hand, and for auto mode."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.model_management

from ..launcher.pool.devices import Placement
from ..parallel_runtime.client.remote_vae import parallelize_vae, stock_of, why_by_stock
from ..parallel_runtime.errors import LayoutError, Refused
from .here import own_device, why_one_gpu
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
    Raises Refused where it cannot.
    """
    if why := why_on_one(vae, placement):
        raise Refused(f"{why}.")
    return parallelize_vae(vae, partial(runtime.pool_for, choice), holds_own_device(placement), keeps=False)


def holds_own_device(placement: Placement) -> bool:
    return own_device() in [device.name for device in placement.devices]


def why_on_one(vae: Any, placement: Placement) -> str:
    """Say why ComfyUI itself decodes and encodes, and no pool there; empty where one can."""
    return (
        why_one_gpu()
        if placement.is_one_gpu
        else "the pool spans several machines"
        if placement.other_machines
        else "stages of a pipeline hold parts of models"
        if placement.layout.stages > 1
        else "it stays on the CPU, as --cpu-vae says"
        if vae.device.type == "cpu" and placement.devices[0].is_gpu
        else f"a node has put it on {vae.device}"
        if vae.device != comfy.model_management.get_torch_device()
        else why_by_stock(vae)
    )
