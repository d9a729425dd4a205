"""Upscale models, described in the UI and built again in a rank. Their weights are sent as they
are, through shared memory. Read: comfy_extras/nodes_upscale_model.py @ ComfyUI 0.30.0.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ..errors import Refused


def upscaler_source(upscaler: Any) -> dict[str, Any]:
    """In the UI: the tree from which a rank builds a descriptor of spandrel's."""
    state = {name: tensor.detach() for name, tensor in upscaler.model.state_dict().items()}
    return {"upscaler": upscaler_name(upscaler), "state": state}


def upscaler_name(upscaler: Any) -> str:
    return f"{type(upscaler.model).__name__} ({upscaler.architecture.id}, {upscaler.scale}x)"


class Upscaler(torch.nn.Module):
    """Computes as a descriptor does. Its picture is as large as its model's output."""

    def __init__(self, descriptor: Any):
        super().__init__()
        self.model = descriptor.model
        self._descriptor = descriptor

    def upscale(self, samples: torch.Tensor) -> torch.Tensor:
        return self._descriptor(samples)


def build_upscaler(source: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """In a rank: the module of ``upscaler_source``'s tree. Raises Refused."""
    import spandrel

    with suppress(Exception):  # as there: whatever is wrong with it
        from spandrel_extra_arches import EXTRA_REGISTRY  # pyright: ignore[reportMissingImports]

        spandrel.MAIN_REGISTRY.add(*EXTRA_REGISTRY, ignore_duplicates=True)
    made, state = None, source["state"]
    with suppress(spandrel.UnsupportedModelError):
        made = spandrel.ModelLoader().load_from_state_dict(dict(state)).eval()
    if (
        made is None
        or upscaler_name(made) != source["upscaler"]
        or made.model.state_dict().keys() != state.keys()
    ):
        raise Refused(
            f"spandrel does not recognise the weights of this {source['upscaler']}: compute it without the"
            " pool."
        )
    return Upscaler(made).to(device)
