"""Samples a guider's MODELs in the pool while the switch is on. If the pool cannot compute a
sampling exactly, one GPU does, and a notice says why: auto mode makes nothing worse.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ...parallel_runtime.client.coroutines import RandomState
from ...parallel_runtime.client.interrupt import held, interrupted, interrupting
from ...parallel_runtime.client.remote_patcher import Remote, RemotePatcher
from ...parallel_runtime.client.run import Run
from ...parallel_runtime.errors import (
    LayoutError,
    PipeMeshError,
    PoolFailed,
    PoolSpent,
    Refused,
    RunCancelled,
)
from ..bounded_dict import Latest
from ..local_devices import why_one_gpu
from ..notices import Notices, executed_now
from ..runtime import Runtime
from ..timing import StepTimes, TimingKey
from .layouts import (
    in_chosen_layout,
    in_place_of,
    laid_out_anew,
    note,
    require_more_than_frames,
    require_several,
)
from .seam import StockCall

GIVEN_UP = "On one GPU: the pool has failed in this prompt already."
FAILED_LATE = "On one GPU: The last sampling of this kind failed after a step: {}"
NO_ROOM = (
    "On one GPU: Workers ran out of memory in the last {} prompts of this kind. Make the image or the batch"
    " smaller, or sample once with auto mode off: then the pool is tried again."
)
NO_ROOM_TIMES = 2
GRADIENTS = "This node needs gradients, which the ranks do not send back."
log = logging.getLogger("pipemesh")


class PoolSampling:
    def __init__(self, runtime: Runtime, notices: Notices, times: StepTimes):
        self._runtime = runtime
        self._notices = notices
        self._times = times
        # In ranks for its sake
        self._lent: weakref.WeakKeyDictionary[BaseModel, Remote] = weakref.WeakKeyDictionary()
        self._sampled: list[BaseModel] = []  # by guiders that run in the pool now
        self._given_up = ""  # the prompt in which the pool has failed
        # What failed after a first step, by its kind: why, and which prompt does without the pool
        self._late: Latest[TimingKey, tuple[str, str]] = Latest()
        # By kind, the last prompts in a row in which a lack of memory has ended a pool
        self._spent: Latest[TimingKey, int] = Latest()

    @interrupting
    def sample(self, guider: Any, run: StockCall, *, is_on: bool) -> Any:
        """Runs a guider's sampling in the pool if the switch ``is_on``. MODELs that a node of
        PipeMesh has parallelized always keep their pool. If that node left the layout open, they
        get the layout that is chosen for this sampling.
        """
        models = models_of(guider)
        if not is_on:
            self._give_back(list(self._lent))
            self._spent.clear()
        is_parallel = any(isinstance(model, RemotePatcher) for model in models.values())
        if not is_parallel and not is_on:
            return run()
        try:
            if is_parallel:
                with laid_out_anew(self._runtime, guider, models, run.given):
                    return run()
            return self._tried_in_pool(guider, models, run)
        finally:
            self._runtime.wait.end()

    def _tried_in_pool(self, guider: Any, models: Mapping[str, ModelPatcher], run: StockCall) -> Any:
        """Samples in the pool. A sampling that fails before its first step begins anew, from the
        same random numbers: once in a fresh pool if a worker died, else on one GPU, where ComfyUI's
        own errors come back. A later failure is raised as it is, because sampling again would take
        as long again; the next prompt with the same key samples on one GPU.
        """
        if why_not := self._why_not_tried(run):
            self._notices.tell(why_not)
            return self._on_one_gpu(models, run)
        random = RandomState()
        for again in (True, False):
            try:
                output = self._in_pool(guider, models, run)
                self._spent.pop(run.steps.key, None)
                return output
            except RunCancelled:
                raise
            except Exception as error:  # a graph that works without PipeMesh works with it
                if run.steps.has_finished_one:
                    self._late[run.steps.key] = reason_of(error), ""
                    log.warning("[PipeMesh] The next prompt of this kind is sampled on one GPU.")
                    raise
                again = again and isinstance(error, PoolFailed)
                self._tell(error, again)
                if isinstance(error, (PoolFailed, PoolSpent)) and not again:
                    self._given_up = executed_now()[1]
                if isinstance(error, PoolSpent):
                    self._spent[run.steps.key] = self._spent.get(run.steps.key, 0) + 1
            random.restore()
            if not again:
                break
        return self._on_one_gpu(models, run)

    def _why_not_tried(self, run: StockCall) -> str:
        """Says why the pool is not tried; empty if it is tried.

        A failure after the first step keeps one prompt out of the pool, the first that samples with
        this key again; outside of prompts, one sampling. A sampling that found no memory is tried
        in ``NO_ROOM_TIMES`` prompts, as each try costs a start of the pool.
        """
        prompt = executed_now()[1]
        if self._given_up and self._given_up == prompt:
            return GIVEN_UP
        if self._spent.get(run.steps.key, 0) >= NO_ROOM_TIMES:
            return NO_ROOM.format(NO_ROOM_TIMES)
        late, first = self._late.pop(run.steps.key, ("", ""))
        if first not in ("", prompt):
            return ""
        if late and prompt:
            self._late[run.steps.key] = late, prompt
        return FAILED_LATE.format(late) if late else ""

    def _on_one_gpu(self, models: Mapping[str, ModelPatcher], run: StockCall) -> Any:
        self._runtime.wait.end()
        self._give_back([model.model for model in models.values()])
        return run()

    def _in_pool(self, guider: Any, models: Mapping[str, ModelPatcher], run: StockCall) -> Any:
        """Raises every error of the pool."""
        if not models:
            raise Refused(f"{type(guider).__name__} samples a model that is no ModelPatcher of ComfyUI's.")
        if torch.is_grad_enabled():
            raise Refused(GRADIENTS)
        own = comfy.model_management.get_torch_device()
        for model in models.values():
            if model.load_device != own:  # as by Select Model Device
                on = f"{model.load_device}, but ComfyUI computes on {own}"
                raise Refused(f"A node has put this MODEL on {on}.")
        choice = self._runtime.default_choice()
        if choice.placement.is_one_gpu:
            raise LayoutError(why_one_gpu())
        for model in models.values():
            self._runtime.trials.require(type(model.model.diffusion_model), model.model)
            require_more_than_frames(model, guider, run.given)
        parallel, planned = in_chosen_layout(self._runtime, guider, models, choice, run.given)
        require_several(planned, next(iter(models.values())), choice)
        if slower := self._times.why_slower(run.steps.key, planned.layout):
            raise Refused(slower)
        for patcher in parallel.values():
            self._lent[patcher.model] = patcher.remote
        before = last_runs(parallel)
        outer = len(self._sampled)
        self._sampled += [model.model for model in models.values()]
        try:
            with in_place_of(guider, parallel):
                output = run()
        finally:
            del self._sampled[outer:]
        note(self._runtime, parallel, planned)
        sigmas = run.given.get("sigmas")
        if sigmas is not None and sigmas.shape[-1] and last_runs(parallel) == before:
            self._notices.tell(
                f"On one GPU: {type(guider).__name__} has sampled without the MODEL that it was given."
            )
        return output

    def _tell(self, error: Exception, again: bool) -> None:
        """Tells why a run begins anew. The log has the whole error, and the traceback of one that
        PipeMesh did not raise on purpose.
        """
        if not isinstance(error, PipeMeshError):
            log.warning("[PipeMesh] An error in the pool:", exc_info=error)
        if again:
            log.warning("[PipeMesh] Once more, in a fresh pool: %s", error)
        else:
            self._notices.tell(f"On one GPU: {reason_of(error)}", str(error).partition("\n")[2])

    @interrupting
    def _give_back(self, models: Iterable[BaseModel]) -> None:
        """Frees the copies of these models that ranks hold for auto mode, because ComfyUI needs
        that memory. A guider around this one keeps its models. Raises ComfyUI's interrupt.
        """
        for model in models:
            if model in self._lent and not any(model is one for one in self._sampled):
                pool = self._lent[model].pool
                pool.sessions.settle(interrupted)
                with held(pool.turn):
                    self._lent.pop(model).release()


def models_of(guider: Any) -> dict[str, ModelPatcher]:
    """Returns the MODELs that a guider samples, by attribute: one, or two as DualModelGuider."""
    return {
        name: value
        for name, value in vars(guider).items()
        if isinstance(value, ModelPatcher) and isinstance(value.model, BaseModel)
    }


def last_runs(models: Mapping[str, RemotePatcher]) -> list[Run | None]:
    return [patcher.remote.pool.runs.last for patcher in models.values()]


def reason_of(error: Exception) -> str:
    """Returns the first line of the error, without the next move that it proposes: nothing has gone
    wrong, so there is nothing to do.
    """
    sentence = str(error).partition("\n")[0]
    if not isinstance(error, PipeMeshError):
        return f"{type(error).__name__}: {sentence}"
    thing, colon, move = sentence.rpartition(": ")
    has_move = isinstance(error, (Refused, LayoutError)) and colon and move[:1].islower()
    return f"{thing}." if has_move else sentence
