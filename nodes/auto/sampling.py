"""Samples a guider's MODELs in the pool while the switch is on, and on one GPU, with a notice, what
the pool cannot honour: auto mode makes nothing worse.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ...launcher.pool.devices import Placement
from ...parallel_runtime.client.remote_patcher import Remote, RemotePatcher
from ...parallel_runtime.client.run import Run as PoolRun
from ...parallel_runtime.errors import LayoutError, PipeMeshError, Refused
from ..notices import Notices
from ..runtime import Runtime
from .seam import GuiderSeam, HostChanged, Run
from .switch import Switch

GRADIENTS = "This node wants gradients, which do not come back from the ranks."


class Auto:
    """``unavailable`` says why this ComfyUI cannot have auto mode; empty where it can."""

    def __init__(self, runtime: Runtime, switch: Switch, notices: Notices):
        self.switch = switch
        self.unavailable = ""
        self._runtime = runtime
        self._notices = notices
        self._seam = GuiderSeam(self.sample, self.unseen)
        self._lent: weakref.WeakSet[Remote] = weakref.WeakSet()  # models in ranks for its sake

    def install(self) -> None:
        try:
            self._seam.install()
        except HostChanged as error:
            self.unavailable = str(error)
            self._notices.tell(self.unavailable)

    def remove(self) -> None:
        self._seam.remove()

    def sample(self, guider: Any, sigmas: Any, run: Run) -> Any:
        """Runs a guider's sampling in the pool where the switch is on. MODELs that a node of
        PipeMesh has parallelized keep their pool.

        What fails in the pool begins anew on one GPU, from the same random numbers.
        """
        if not self.switch.is_on():
            self._give_back()
            return run()
        models = models_of(guider)
        if any(isinstance(model, RemotePatcher) for model in models.values()):
            return run()
        random = random_state()
        try:
            return self._in_pool(guider, models, sigmas, run)
        except PipeMeshError as error:
            self._notices.tell(f"On one GPU: {reason_of(error)}")
        self._give_back()
        set_random_state(random)
        return run()

    def unseen(self, guider: Any) -> None:
        """Tells of a guider whose class samples without ``CFGGuider.sample``."""
        if self.switch.is_on() and not isinstance(guider.model_patcher, RemotePatcher):
            self._notices.tell(f"On one GPU: {type(guider).__name__} has a sample method of its own, which PipeMesh does not know.")

    def _in_pool(self, guider: Any, models: Mapping[str, ModelPatcher], sigmas: Any, run: Run) -> Any:
        """Raises PipeMeshError."""
        if not models:
            raise Refused(f"{type(guider).__name__} samples a model that is not of ComfyUI's kind.")
        if torch.is_grad_enabled():
            raise Refused(GRADIENTS)
        choice = self._runtime.default_choice()
        check_devices(choice.placement)
        parallel = {name: self._runtime.parallelize(model, choice) for name, model in models.items()}
        self._lent.update(patcher.remote for patcher in parallel.values())
        before = last_runs(parallel)
        with in_place_of(guider, parallel):
            output = run()
        if sigmas is not None and sigmas.shape[-1] and last_runs(parallel) == before:
            self._notices.tell(f"On one GPU: {type(guider).__name__} has sampled without the MODEL that it was given.")
        return output

    def _give_back(self) -> None:
        """Frees what ranks hold for auto mode: on the UI's own GPU stock ComfyUI needs the room."""
        for remote in list(self._lent):
            remote.release()
        self._lent.clear()


def check_devices(placement: Placement) -> None:
    """Raises LayoutError where more ranks would not be faster than ComfyUI alone."""
    own = comfy.model_management.get_torch_device()
    if placement.layout.world_size < 2:
        raise LayoutError("There is one GPU here, and nothing to share an image with.")
    if own.type != "cpu" and not placement.devices[0].is_gpu:
        raise LayoutError(f"ComfyUI computes on {own}, where PipeMesh has no ranks.")


def models_of(guider: Any) -> dict[str, ModelPatcher]:
    """Returns the MODELs that a guider samples, by attribute: one, or two as DualModelGuider."""
    return {name: value for name, value in vars(guider).items() if is_model(value)}


def is_model(value: Any) -> bool:
    return isinstance(value, ModelPatcher) and isinstance(value.model, BaseModel)


@contextmanager
def in_place_of(guider: Any, models: Mapping[str, ModelPatcher]) -> Iterator[None]:
    """Puts ``models`` into the guider's attributes and, however it goes on, takes them out again.
    The guider keeps its own ``model_options``: a node may have changed them.
    """
    own = {name: getattr(guider, name) for name in models}
    vars(guider).update(models)
    try:
        yield
    finally:
        vars(guider).update({name: model for name, model in own.items() if getattr(guider, name) is models[name]})


def last_runs(models: Mapping[str, RemotePatcher]) -> list[PoolRun | None]:
    return [patcher.remote.pool.last_run for patcher in models.values()]


def reason_of(error: PipeMeshError) -> str:
    """Returns the error without its next move, which is of no use where nothing has gone wrong."""
    sentence = str(error).partition("\n")[0]
    thing, colon, move = sentence.rpartition(": ")
    return f"{thing}." if isinstance(error, (Refused, LayoutError)) and colon and move[:1].islower() else sentence


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the state of torch's random numbers, on every device that has some."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
