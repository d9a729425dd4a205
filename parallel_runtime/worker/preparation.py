"""Sets ComfyUI up inside a rank: its arguments, its way of loading weights, and the products that
it computes on small numbers.

Read: comfy/ops.py (pick_operations), comfy/model_management.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import torch

log = logging.getLogger("pipemesh")
CPU = torch.device("cpu")
PRODUCTS = re.compile(r"supports_(\w+)_compute")  # the functions by which ComfyUI asks a device


def prepare(comfyui: str, args: dict[str, Any], ranks: int = 1, device: torch.device = CPU) -> None:
    """Makes ``comfy`` importable with the UI's arguments. Call it before any module of ComfyUI is
    imported: dtypes and attention kernels are fixed at import, by torch's current device, which is
    ComfyUI's own. ``ranks``: of the pool. ``device``: the rank's; no context is made on another.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    make_comfyui_importable(comfyui, args)
    import comfy.model_base
    import comfy.model_management

    # The file's mapped pages become the weights: one copy in the page cache for all ranks, instead
    # of one private copy each.
    stock_load = comfy.model_base.BaseModel.load_model_weights
    comfy.model_base.BaseModel.load_model_weights = lambda model, sd, prefix="", assign=False: stock_load(
        model, sd, prefix, assign=True
    )
    # A stage leaves out the blocks of others before anything goes to its GPU, under --highvram too.
    comfy.model_management.unet_inital_load_device = lambda parameters, dtype: CPU
    comfy.model_management.unet_offload_device = lambda: CPU
    # Pinned memory is locked, and pinned pages of a file are this process's own copy of them.
    comfy.model_management.MAX_PINNED_MEMORY = share_of_pinned(
        comfy.model_management.MAX_PINNED_MEMORY, ranks
    )


def make_comfyui_importable(comfyui: str, args: dict[str, Any]) -> None:
    """Makes ``comfy`` importable as it is, with these arguments."""
    sys.path.insert(0, comfyui)
    import comfy.cli_args as cli

    for name, value in args.items():
        if name == "fast":
            value = {cli.PerformanceFeature(item) for item in value}
        setattr(cli.args, name, value)


def share_of_pinned(most: float, ranks: int) -> float:
    """Returns how many bytes each of ``ranks`` may pin if ComfyUI would pin ``most``: together half
    as much, so that the file's pages and ComfyUI keep the rest. -1, which means none, stays.
    """
    return most / (2 * ranks) if most > 0 else most


def multiply_alike(store: Any, rank: int, ranks: int) -> None:
    """Makes this rank's ComfyUI compute products in fp8, MXFP8 or NVFP4 only if the devices of all
    ranks can. Else rows of one image would have unlike precision on unlike GPUs. ``store``: every
    rank writes its device's answers there.
    """
    import comfy.model_management

    answer_alike(comfy.model_management, store, rank, ranks)


def answer_alike(comfy: Any, store: Any, rank: int, ranks: int) -> None:
    """Replaces the functions of ``comfy`` that ``PRODUCTS`` names by the answer of all ranks."""
    device = comfy.get_torch_device()
    asked = {found[1]: name for name in vars(comfy) if (found := PRODUCTS.fullmatch(name))}
    own = {number for number, name in asked.items() if getattr(comfy, name)(device)}
    store.set(f"products/{rank}", " ".join(sorted(own)))
    every = [{*store.get(f"products/{one}").decode().split()} for one in range(ranks)]
    of_all = set.intersection(*every)
    for number, name in asked.items():
        setattr(comfy, name, lambda device=None, answer=number in of_all: answer)
    if rank == 0 and (left_out := sorted(set.union(*every) - of_all)):
        log.warning(
            "[PipeMesh] Not every device of the pool multiplies in %s: all devices cast weights of this"
            " format before they multiply, so that every row has the same precision. A pool of only the"
            " devices that can is faster.",
            " and ".join(left_out),
        )
