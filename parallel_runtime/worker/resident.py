"""A model that a rank holds: its weights, its weight patches, the parallel method attached to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comfy_bridge.weight_patches import unpack_patches
from ..comfy_bridge.weights import settle_weights
from ..errors import Refused
from ..families import plan_for
from ..methods.pipefusion.stage import StageForward, Watch, blocks_of, leave_out
from ..methods.usp import SequenceParallel
from ..patches import Part
from ..stages import cut, share_out
from ..wire.segment import Segment, TensorRef
from .seat import Seat


def parameter_slot(model: torch.nn.Module, key: str) -> tuple[torch.nn.Module, str]:
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


class ResidentModel:
    """``patcher`` is the host's own ModelPatcher; its weights are on this rank's device, in a
    pipeline those of its own blocks.

    ``stages``: how many blocks each stage has; empty: as many each. Raises LayoutError where that
    cannot be.
    """

    def __init__(self, patcher: Any, device: torch.device, seat: Seat, watch: Watch, stages: Sequence[int] = ()):
        self.patcher = patcher
        self.device = device
        self.rank = seat.rank
        self.patches_id = ""
        self._unpatched: dict[str, torch.nn.Parameter] = {}
        self._unpatched_objects: dict[str, Any] = {}
        self._pending: tuple[dict[str, tuple[int, TensorRef]], Segment] | None = None
        self.diffusion_model = patcher.model.diffusion_model
        plan = plan_for(type(self.diffusion_model))
        if plan is None:
            raise Refused(f"{type(self.diffusion_model).__name__} has no token plan.")
        stage = None
        if seat.link is not None:
            alike = [1.0 for _ in blocks_of(self.diffusion_model, plan)]
            stage = (cut(stages, len(alike)) if stages else share_out(alike, seat.layout.pipefusion))[seat.stage]
            leave_out(self.diffusion_model, plan, stage)
        settle_weights(self.diffusion_model, device, watch.tick)
        self.nbytes = sum(p.numel() * p.element_size() for p in self.diffusion_model.parameters())  # once: every answer reports it
        if stage is None:
            self.method = SequenceParallel(self.diffusion_model, plan, seat.sequence, watch.tick)
        else:
            clocked = not stages  # else they were cut by what was clocked, or by hand
            self.method = StageForward(self.diffusion_model, plan, stage, seat.sequence, seat.link, watch, clocked)

    def patch(
        self, patches_id: str, patches: dict, objects: dict, shared: dict[str, tuple[int, TensorRef]] | None, segment: Segment | None
    ) -> None:
        """Replaces all weight patches. With ``shared``, this rank computes its own keys into
        ``segment``; ``adopt`` follows.
        """
        self.unpatch()
        model = self.patcher.model
        self.patcher.patches = {key: value for key, value in unpack_patches(patches).items() if self._has(key)}
        for name, value in objects.items():
            holder, attribute = _resolve(model, name)
            self._unpatched_objects[name] = getattr(holder, attribute)
            setattr(holder, attribute, value)
        for key in self.patcher.patches:
            if shared is None:
                self._swap(key, self._patched(key))
            elif shared[key][0] == self.rank:
                segment.tensor(shared[key][1]).copy_(self._patched(key))
        if shared is None:
            self.patcher.patches = {}
            self.patches_id = patches_id
        else:
            self._pending = (shared, segment)
            self.patches_id = patches_id

    def _has(self, key: str) -> bool:
        """A stage has no weights but those of its own blocks."""
        try:
            module, name = parameter_slot(self.patcher.model, key)
        except AttributeError:
            return False
        return hasattr(module, name)

    def adopt(self) -> None:
        shared, segment = self._pending
        for key, (_rank, ref) in shared.items():
            self._swap(key, segment.tensor(ref))
        self._pending = None
        self.patcher.patches = {}

    def unpatch(self) -> None:
        for key, parameter in self._unpatched.items():
            module, name = parameter_slot(self.patcher.model, key)
            setattr(module, name, parameter)
        self._unpatched.clear()
        for name, value in self._unpatched_objects.items():
            holder, attribute = _resolve(self.patcher.model, name)
            setattr(holder, attribute, value)
        self._unpatched_objects.clear()
        self.patches_id = ""
        self._pending = None

    def _patched(self, key: str) -> torch.Tensor:
        return self.patcher.patch_weight_to_device(key, device_to=self.device, return_weight=True)

    def _swap(self, key: str, weight: torch.Tensor) -> None:
        module, name = parameter_slot(self.patcher.model, key)
        self._unpatched[key] = getattr(module, name)
        setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, arguments: dict[str, Any], number: int, part: Part | None) -> Any:
        model = self.diffusion_model
        call = model._forward if hasattr(type(model), "_forward") else model.forward
        if part is None:
            return call(**self.method.begin(arguments))
        return self.method.run(call, arguments, number, part)


def _resolve(model: Any, name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    for part in path:
        model = getattr(model, part)
    return model, attribute
