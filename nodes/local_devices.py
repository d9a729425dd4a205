"""Names the device on which this ComfyUI computes, and sets up ranks that compute as it does."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy
import comfy.cli_args
import comfy.model_management

from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.layout import in_one_sequence
from ..parallel_runtime.wire.tree import is_plain
from ..pool.devices import CUDA_VARIABLE, Device, hidden_gpus, place
from ..pool.rank_setup import RankSetup, rank_setup_from
from .settings import Choice, how_many

ONE_GPU = "There is one GPU here, so there is no second one to share an image with."
ONE_SEEN = (
    "ComfyUI sees one of the {} GPUs here, because CUDA_VISIBLE_DEVICES is {}. Start ComfyUI without"
    " --cuda-device, or name several GPUs in that variable."
)
log = logging.getLogger("pipemesh")


def own_device() -> str:
    """Return the device that ComfyUI itself computes on."""
    return str(comfy.model_management.get_torch_device())


def why_one_gpu() -> str:
    """Say why an image stays on one GPU if ComfyUI sees no second one."""
    there = hidden_gpus(os.environ)
    return ONE_SEEN.format(there, os.environ[CUDA_VARIABLE]) if there else ONE_GPU


def all_devices(gpus: tuple[Device, ...]) -> Choice:
    """Choose all of ``gpus``; two ranks on the CPU if ComfyUI computes on the CPU. Raises
    LayoutError if ComfyUI computes on anything else.
    """
    return Choice(
        place(in_one_sequence(how_many("auto", gpus)), "auto", "auto", gpus, own_device()), is_open=True
    )


def plain_args(args: dict[str, Any]) -> dict[str, Any]:
    """Keep the parsed arguments of ComfyUI that can be sent to a rank. ``fast`` is a set of enum
    members and goes by value.
    """
    plain = {name: value for name, value in args.items() if is_plain(value)}
    return {**plain, "fast": [feature.value for feature in args.get("fast") or ()]}


def rank_setup(environ: Mapping[str, str]) -> RankSetup:
    """Return the set-up of ranks that compute as this ComfyUI does. Raises LayoutError if a
    variable cannot be read.
    """
    return rank_setup_from(
        environ, str(Path(comfy.__path__[0]).parent), plain_args(vars(comfy.cli_args.args))
    )


def setup_or_fault(environ: Mapping[str, str]) -> tuple[RankSetup, str]:
    """Return the set-up, and a sentence that names an environment variable that cannot be read,
    empty if all can. It is raised when a pool is to start, so that ComfyUI loads the nodes.
    """
    try:
        return rank_setup(environ), ""
    except LayoutError as error:
        log.error("[PipeMesh] %s", error)
        return rank_setup({}), str(error)
