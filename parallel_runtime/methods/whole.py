"""Compute a whole forward on one rank, of a model that cannot be cut along its tokens: a UNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..comm.in_step import Expected
from ..comm.mesh import SequenceComm
from ..errors import LayoutError
from ..families.plan import TokenPlan
from ..layout import OF_A_GROUP, Layout, listed
from ..patches import Part
from .method import ALONE, Facts


class WholeForward:
    """Runs the model as it is. ``on_progress`` is called at every module of its lists, where the
    rank may also leave the forward.
    """

    def __init__(self, model: nn.Module, comm: SequenceComm, on_progress: Callable[[], None] = lambda: None):
        self._model = model
        self._comm = comm
        self._on_progress = on_progress
        self._handles: list[Any] = []

    @staticmethod
    def check(model: nn.Module, plan: TokenPlan, layout: Layout) -> None:
        if layout.group_size > 1:
            raise LayoutError(
                f"{layout.equation()}: {type(model).__name__} cannot be cut, set {listed(OF_A_GROUP)} to 1."
            )

    def attach(self) -> None:
        for container in self._model.children():
            if isinstance(container, nn.ModuleList):
                self._handles += [module.register_forward_pre_hook(self._entering) for module in container]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _entering(self, _module: nn.Module, _args: Any) -> None:
        self._on_progress()
        self._comm.stop.decide(self._comm.stop.wish(torch.empty(0)))

    def begin(self, part: Part, expected: Expected = ALONE) -> None:
        self._comm.begin(0)

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Residuals of a ControlNet lie in the arena: they are moved to where the latent is."""
        device = next(iter(arguments.values())).device
        if arguments.get("control"):
            control = arguments["control"]
            moved = {
                key: [None if one is None else one.to(device) for one in residuals]
                for key, residuals in control.items()
            }
            arguments = {**arguments, "control": moved}
        return forward(**arguments)

    def fail(self, number: int) -> None:
        """No rank waits for another."""

    def end_run(self) -> None:
        self._comm.free_buffers()

    @property
    def facts(self) -> Facts:
        return Facts()
