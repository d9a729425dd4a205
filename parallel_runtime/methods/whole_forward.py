"""Compute a whole forward on one rank, of a model that cannot be cut along its tokens, or that
nobody has written a plan for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..comm.mesh import SequenceComm
from ..errors import LayoutError, Refused
from ..families.plan import TokenPlan
from ..layout import OF_A_GROUP, Layout, listed
from .method import Method


class WholeForward(Method):
    """Runs the model as it is. ``on_progress`` is called at every module of its lists, where the
    rank may also leave the forward. ``is_tried``: else an evaluation is refused that another rank
    would have computed otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: SequenceComm,
        on_progress: Callable[[], None] = lambda: None,
        is_tried: bool = True,
    ):
        self._model = model
        self._is_tried = is_tried
        super().__init__(comm)
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
        self._comm.stop.decide(self._comm.stop.wants_stop)

    def forward(self, forward: Callable[..., Any], arguments: dict[str, Any], number: int) -> Any:
        """Call the model's forward. Residuals of a ControlNet lie in the arena, so they are moved
        to the latent's device first.
        """
        device = next(iter(arguments.values())).device
        if arguments.get("control"):
            control = arguments["control"]
            moved = {
                key: [None if one is None else one.to(device) for one in residuals]
                for key, residuals in control.items()
            }
            arguments = {**arguments, "control": moved}
        if self._is_tried:
            return forward(**arguments)
        random, kept = random_state(device), kept_state(self._model)
        output = forward(**arguments)
        if not all(map(torch.equal, random_state(device), random)):
            raise on_one_gpu(self._model, "draws random numbers, which differ on each GPU")
        if name := changed_since(self._model, kept):
            raise on_one_gpu(self._model, f"keeps {name} from one evaluation to the next")
        return output


OF_TORCH = frozenset(vars(nn.Module()))
# path of a module -> attribute -> it, and its content
KeptState = Mapping[str, Mapping[str, tuple[Any, ...]]]


def on_one_gpu(model: nn.Module, does: str) -> Refused:
    return Refused(
        f"{type(model).__name__} {does}, so several GPUs would not make the image of one GPU: sample it on"
        " one GPU, without PipeMesh Parallelize."
    )


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a forward uses if it names none."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def kept_state(model: nn.Module) -> KeptState:
    """Return the submodules that every module has, and the attributes and buffers that modules of
    ComfyUI's models have. Attributes of layers are left out, because code that keeps weights
    changes them.
    """
    return {
        path: {name: (value, *held_in(value)) for name, value in state_attributes_of(module).items()}
        for path, module in model.named_modules()
    }


def state_attributes_of(module: nn.Module) -> dict[str, Any]:
    is_of_model = type(module).__module__.startswith("comfy.ldm.")
    own = {**vars(module), **module._buffers} if is_of_model else {}
    return {**{name: value for name, value in own.items() if name not in OF_TORCH}, **module._modules}


def held_in(value: Any) -> tuple[Any, ...]:
    """Return values that change when the content of ``value`` changes: a tensor's version, or the
    elements of a dict or list.
    """
    if isinstance(value, torch.Tensor):
        return () if value.is_inference() else (value._version,)
    if type(value).__module__.startswith("comfy.") and not isinstance(value, nn.Module):
        value = getattr(value, "__dict__", {})
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list) else ()


def changed_since(model: nn.Module, before: KeptState) -> str:
    """Return the path of the first attribute that has changed; empty if none has."""
    for path, now in kept_state(model).items():  # a module stands before those that it has
        for name in {**before[path], **now}:
            own, other = now.get(name, ()), before[path].get(name, ())
            if len(own) != len(other) or any(map(is_other, own, other)):
                return f"{path}.{name}".lstrip(".")
    return ""


def is_other(value: Any, before: Any) -> bool:
    return value is not before and not (isinstance(value, (bool, int, float, str)) and value == before)
