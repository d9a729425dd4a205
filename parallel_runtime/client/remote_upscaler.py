"""An upscale model in a pool: each rank computes whole tiles of a picture, which ComfyUI's node
cuts and puts together. Read: comfy_extras/nodes_upscale_model.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import comfy.model_management
import comfy.utils
import torch

from ..crossing.upscalers import upscaler_source
from ..errors import Refused
from ..vae_modules import PUT_IN_PLACE
from .remote_pool import RemotePool
from .remote_vae import FirstStage, RemoteVAE, VAEPatcher, hold_part, with_own_weights
from .tiles import OnTile, side_by_side

PIXELS = 32  # rows and columns with which a model is tried
WORK = "upscale"
TILE, OVERLAP = 512, 32  # pixels, of the node's tiles
UPSCALER_NODE = "Upscale Image (using Model)"
PLAIN = (bool, int, float, str, list, tuple, dict, torch.device, torch.dtype, Enum, type(None))
T = TypeVar("T")


class RemoteUpscaler(RemoteVAE):
    kind = "upscaler"
    behind = "This upscale model is on the devices of a pool, and a node has changed it since."

    @property
    def module(self) -> torch.nn.Module:
        return self.vae.model

    def why_by_stock(self) -> str:
        return why_not_upscaled(self.vae)

    def source(self) -> dict[str, Any]:
        return upscaler_source(self.vae)

    def compute_whole(self, work: str, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As a VAE's. A small part of the first tile is computed by ComfyUI, too."""
        part, by_ranks = tiles[0][..., :PIXELS, :PIXELS].contiguous(), super().compute_whole

        def surely() -> list[torch.Tensor]:
            patcher = self.vae.patcher
            comfy.model_management.load_models_gpu([patcher])  # may take the room of what ranks hold
            return [self.vae(part.to(patcher.load_device)).cpu()]

        name, look = f"{type(self.module).__name__} in the pool", (partial(by_ranks, work, [part]), surely)
        hold_part(self.firsts, (work, 1), name, look)
        return by_ranks(work, tiles)


def why_not_upscaled(upscaler: Any) -> str:
    """Returns why ComfyUI itself upscales with a model; empty if ranks may be able to."""
    if type(upscaler).__module__.partition(".")[0] != "spandrel" or not hasattr(upscaler, "patcher"):
        return "it is none that ComfyUI loads"
    if upscaler.patcher.patches or upscaler.patcher.object_patches:
        return "it has weight patches"
    changed = any(
        module._forward_pre_hooks or module._forward_hooks or {*PUT_IN_PLACE} & vars(module).keys()
        for module in upscaler.model.modules()
    )
    return "a node has put code of its own into it" if changed else ""


def largest_share(image: torch.Tensor, ranks: int) -> float:
    """Return which share of ``image`` (B, H, W, C) the rank computes that has most of its tiles."""
    if image.dim() != 4 or not image.numel():
        return 1.0
    batch, height, width, _ = image.shape
    tiles = batch * comfy.utils.get_tiled_scale_steps(width, height, TILE, TILE, OVERLAP)
    return math.ceil(tiles / ranks) / tiles


class TileTooLarge(BaseException):
    """A tile did not fit a rank. ComfyUI's node would go on with smaller tiles, but the pool has
    computed the larger ones ahead, so the node must be called again.
    """


class ForNode:
    """Stands for ``model``, an upscale model, in a call of ComfyUI's node. The node halves its
    tiles as often as it is told at first that there is no room. The ranks' copy stays when the node
    moves the model; numbers and texts are the model's own.
    """

    def __init__(self, model: Any, patcher: VAEPatcher, scale: float, on_tile: OnTile, halved: int, why: str):
        self._model = model
        self.patcher = patcher
        self.scale = scale
        self._on_tile, self._halved, self._why = on_tile, halved, why

    def to(self, *args: Any, **kwargs: Any) -> ForNode:
        given = (*args, *kwargs.values())
        if any(isinstance(one, (torch.dtype, torch.Tensor)) for one in given):
            raise self._refused("to, with a dtype")
        return self

    cpu = cuda = eval = to

    def __getattr__(self, name: str) -> Any:
        """Returns the other attributes of the model that the node reads. Raises Refused unless it
        is a plain value: a method would compute in ComfyUI, or change the ranks' copy.
        """
        value = getattr(self._model, name)
        if not isinstance(value, PLAIN):
            raise self._refused(name)
        return value

    def _refused(self, name: str) -> Refused:
        return Refused(
            f"{UPSCALER_NODE} of this ComfyUI asks an upscale model for {name}, which ranks do not have:"
            " update PipeMesh."
        )

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        if self._halved:
            self._halved -= 1
            raise torch.OutOfMemoryError(self._why)
        return self._on_tile(tile)


class UpscalerInPool:
    """The substitute of an upscale model, as ``RemoteVAE`` has it."""

    def __init__(self, host_of: Callable[[], Any], pool_of: Callable[[], RemotePool], holds_ui_device: bool):
        self.remote = RemoteUpscaler(host_of, pool_of, holds_ui_device)
        own, self._scale = host_of().patcher, host_of().scale
        self._patcher = VAEPatcher(FirstStage(self.remote), own.load_device, own.offload_device)

    def through(self, node: Callable[[Any], T]) -> T:
        """Returns the picture that ComfyUI's ``node``, called with a model, makes. With a scale of
        0 the node makes an empty picture, which takes neither memory nor time.
        """
        halved, why = 0, ""
        while True:

            def loop(scale: float, on_tile: OnTile, halved: int = halved, why: str = why) -> T:
                return node(ForNode(self.remote.vae, self._patcher, scale, on_tile, halved, why))

            try:
                with with_own_weights(self.remote):
                    at_once = self.remote.tiles_at_once()
                    return side_by_side(partial(loop, 0), partial(loop, self._scale), self._compute, at_once)
            except TileTooLarge as error:
                halved, why = halved + 1, str(error)

    def _compute(self, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return self.remote.compute_whole(WORK, tiles)
        except torch.OutOfMemoryError as error:
            raise TileTooLarge(str(error)) from error
