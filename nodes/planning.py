"""Choose a pool's layout for the next sampling, by the planner's prediction for the pool's devices,
and keep each choice for the report.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.samplers import CFGGuider

from ..parallel_runtime.client.patching import Patching
from ..parallel_runtime.client.queue_lookahead import QueueLookahead
from ..parallel_runtime.client.remote_model import Remote
from ..parallel_runtime.client.run import Run
from ..parallel_runtime.client.sampler_arguments import Asked
from ..parallel_runtime.client.windows import windows_of
from ..parallel_runtime.errors import RunCancelled
from ..parallel_runtime.families import plan_or_whole
from ..parallel_runtime.families.plan import TokenPlan
from ..parallel_runtime.families.unplanned_models import takes_rows_for_frames
from ..parallel_runtime.layout import Layout, in_groups_of_one
from ..parallel_runtime.memory import system_memory
from ..parallel_runtime.methods.recordings import why_not_recorded, why_unrecorded
from ..parallel_runtime.planner.choice import Plan, legal_layouts, plan, sizes_of, with_running
from ..parallel_runtime.planner.counts import Counts, NotCounted, NotYet
from ..parallel_runtime.planner.job import Job
from ..parallel_runtime.planner.machine import HowKnown, MachineBox, RankDevice, machine_box, over_machines
from ..parallel_runtime.planner.prediction import Prediction
from ..parallel_runtime.planner.ways import Kept
from ..pool.devices import Placement, on_devices
from .measured_devices import MeasuredDevices
from .past_choices import AGAIN, PastChoices
from .settings import Choice
from .timing import StepTimes

log = logging.getLogger("pipemesh")
EVALUATIONS_PER_WARM_UP = 20  # of stages
# As weights are asked for; else all ways
KEEPS: dict[str, tuple[Kept, ...]] = {"whole": ("whole",), "offloaded": ("whole", "offloaded")}
STEP_BYTES = 1 << 28  # in which free memory counts


@dataclass(frozen=True)
class Sampling:
    """Describes the next sampling: the ``shape`` of its latent (B, C, ...), or of each of as many
    context ``windows``; the ``conds`` of every evaluation; and the number of ``evaluations``, one a
    step. ``images`` prompts of the queue are sampled together, in ``rounds`` such groups.
    """

    shape: tuple[int, ...]
    conds: tuple[Mapping[str, Any], ...]
    evaluations: int
    windows: int = 1
    images: int = 1
    rounds: int = 1

    @classmethod
    def of(cls, guider: Any, noise: Any, sigmas: Any) -> Sampling:
        """Raises NotCounted."""
        if not isinstance(noise, torch.Tensor) or noise.is_nested or noise.dim() < 3:
            raise NotCounted("it samples several latents at once")
        conds = dict(guider.original_conds)
        is_cfg = type(guider).predict_noise is CFGGuider.predict_noise  # others have strengths of their own
        if (
            is_cfg
            and math.isclose(guider.cfg, 1.0)
            and not guider.model_options.get("disable_cfg1_optimization", False)
        ):
            conds.pop("negative", None)
        found = tuple(one for several in conds.values() for one in several)
        if not found or sigmas is None or len(sigmas) < 2:
            raise NotCounted("there is nothing to evaluate")
        windows, shape = windows_of(guider.model_options, noise.shape)
        return cls(shape, found, len(sigmas) - 1, windows)

    @property
    def branches(self) -> int:
        """Returns how many evaluations of the transformer each image needs in one evaluation of the
        sampler.
        """
        return len(self.conds) * self.windows

    @property
    def text(self) -> str:
        """Say it in the report's words."""
        prompts, images = len(self.conds), self.shape[0]
        size = " x ".join(map(str, self.shape[1:]))
        windows = f" in {self.windows} context windows" * (self.windows > 1)
        return (
            f"{prompts} prompt{'s' * (prompts > 1)}, {images} latent{'s' * (images > 1)}{windows} of {size},"
            f" {self.evaluations} evaluations{f', {self.images} queued at once' * (self.images > 1)}"
        )


@dataclass(frozen=True)
class PlannedLayout:
    """A choice of a layout. ``plan`` is None if nothing could be predicted; then ``why`` says why
    not. Else ``why`` says by which speeds it was predicted, ``known`` says so in a word, and
    ``box`` names the devices. ``awaits``: the count is not ready, and no suitable pool is up.
    ``images``: prompts of the queue that run at once. ``first_s``: the predicted seconds for one
    evaluation of the running prompt, in its own best layout.
    """

    layout: Layout
    why: str
    asked: str = ""
    plan: Plan | None = None
    warm_up: int = 1
    known: HowKnown | Literal[""] = ""
    box: str = ""
    awaits: bool = False
    first_s: float | None = None
    images: int = 1

    @property
    def best(self) -> Prediction | None:
        best = self.plan.best if self.plan is not None else None
        return best.prediction if best is not None else None

    @property
    def seconds(self) -> float | None:
        """Returns the predicted seconds for one evaluation of all prompts and images."""
        return self.best.seconds if self.best is not None else None

    @property
    def speedup(self) -> float | None:
        best = self.plan.best if self.plan is not None else None
        return None if self.plan is None or best is None else self.plan.speedup(best)

    @property
    def kept(self) -> Kept:
        """Returns the predicted way to keep weights."""
        return self.best.kept if self.best is not None else "whole"

    @property
    def alone_s(self) -> float | None:
        """The predicted seconds of the same sampling on one device. None if the device has too
        little memory, or if its speed is not known and plain figures stand in.
        """
        alone = self.plan.alone() if self.plan is not None and self.known != "plain" else None
        return alone.prediction.seconds if alone is not None and alone.prediction is not None else None

    @property
    def is_one_device(self) -> bool:
        return self.plan is not None and self.layout.world_size == 1


class Planning:
    """Chooses layouts and remembers its choices. ``counts`` counts evaluations. ``ahead`` knows the
    prompts that wait in the queue. ``devices`` is the file with what ranks measured of GPUs.
    """

    def __init__(
        self,
        times: StepTimes,
        counts: Counts,
        devices: Path | None = None,
        ahead: QueueLookahead | None = None,
    ):
        self.times = times
        self.ahead = ahead or QueueLookahead(lambda: None)
        self.measured = MeasuredDevices(devices)
        self.counts = counts
        self._choices: weakref.WeakKeyDictionary[Remote, Choice | None] = weakref.WeakKeyDictionary()
        self._runs: weakref.WeakKeyDictionary[Run, PlannedLayout] = weakref.WeakKeyDictionary()
        self.past = PastChoices()
        # By what was asked: all layouts of 8 GPUs take a third of a second to predict
        self._plans: deque[tuple[tuple, Plan]] = deque(maxlen=2 * AGAIN)

    # -- who asked for a choice, and what was chosen

    def leave_open(self, remote: Remote, choice: Choice | None) -> None:
        """Note that the layout of this MODEL's pool is to be chosen when it is sampled; None: the
        layout is fixed.
        """
        self._choices[remote] = choice

    def left_open(self, remote: Remote) -> Choice | None:
        return self._choices.get(remote)

    def note(self, run: Run | None, planned: PlannedLayout) -> None:
        """Keep how a run was planned."""
        if run is not None:
            self._runs[run] = planned

    def of(self, run: Run) -> PlannedLayout | None:
        return self._runs.get(run)

    # -- choosing

    def choose(
        self,
        model: BaseModel,
        choice: Choice,
        asked: Callable[[], Sampling],
        running: Iterable[Layout],
        room: Mapping[str, int] = MappingProxyType({}),
        merges: bool = True,
        to_come: Callable[[], Asked] | None = None,
    ) -> PlannedLayout:
        """Choose the layout of ``choice`` for a model. If nothing can be predicted, it is the
        layout of the choice's placement; if a prediction needs more time, one of the ``running``
        layouts.

        ``asked`` describes the sampling, or raises NotCounted. ``running`` are the layouts of the
        live pools on its devices. ``room`` holds the bytes that ranks may take on each device whose
        free memory is known. ``merges`` says whether a ring can compute the model's attention.
        ``to_come`` returns the sampler's arguments, by which queued prompts are found that can be
        sampled beside it; with None no prompt is. Raises RunCancelled.
        """
        own, running = choice.placement, tuple(running)
        try:
            self.ahead.forget()
            sampling = asked()
            if self.ahead.is_wanted(choice.looks_ahead) and to_come is not None:
                images, rounds = self.ahead.at_once(len(own.devices), to_come)
                sampling = replace(sampling, images=images, rounds=rounds)
            return self._chosen(model, choice, sampling, running, room, merges)
        except NotYet as error:
            up = self._fitting(model, choice, running)
            planned = PlannedLayout(up or own.layout, str(error), awaits=up is None)
        except NotCounted as error:
            planned = PlannedLayout(own.layout, str(error))
        except RunCancelled:
            raise
        except Exception as error:  # noqa: BLE001 - another pack's guider may look otherwise, and its image does not depend on this
            log.warning("[PipeMesh] No layout could be predicted:", exc_info=error)
            planned = PlannedLayout(own.layout, f"{type(error).__name__}, see the log")
        self.past.note(own.devices, (type(model),), None, planned.layout)
        return planned

    def _fitting(self, model: BaseModel, choice: Choice, running: Iterable[Layout]) -> Layout | None:
        """Return one of the ``running`` layouts that certainly suits the model: its own layout, one
        that a model of this class had before on these devices, or groups of one rank, which demand
        nothing of a model. None if none of them runs.
        """
        taken = {
            one.taken
            for one in self.past
            if one.kind[0] is type(model) and one.devices == choice.placement.devices
        }
        suits = {choice.placement.layout} | {one for one in taken if one.stages == 1}
        return next(
            (one for one in running if one.world_size > 1 and (one in suits or one.group_size == 1)),
            None,
        )

    def _chosen(
        self,
        model: BaseModel,
        choice: Choice,
        asked: Sampling,
        running: Iterable[Layout],
        room: Mapping[str, int],
        merges: bool,
    ) -> PlannedLayout:
        """Raises NotCounted."""
        placement = choice.placement
        if choice.weights == "sharded":
            raise NotCounted("weights are asked for as sharded, over all ranks of one sequence")
        here = self._here(placement, room)
        approximate = may_be_approximate(choice, plan_or_whole(type(model.diffusion_model)))
        warm_up = max(1, asked.evaluations // EVALUATIONS_PER_WARM_UP)
        is_up = self._fitting(model, choice, running) is not None
        job = Job(
            whole=self.counts.of(model, asked.conds, asked.shape, is_up),
            evaluations=asked.evaluations,
            branches=asked.branches,
            batch=asked.shape[0] * asked.images,
            warm_up=warm_up,
            keeps=KEEPS.get(choice.weights, Job.keeps),
            merges=merges,
            together=takes_rows_for_frames(model.diffusion_model),
            replays=may_replay(plan_or_whole(type(model.diffusion_model)), placement.backend),
        )
        made = self._predicted(job, here, approximate)
        kind = type(model), asked.shape, asked.branches, asked.evaluations, asked.images
        wanted = {one.best for one in self.past if one.devices == placement.devices and one.kind != kind}
        best = made.best
        of_queue = replace(job, evaluations=asked.evaluations * asked.rounds)
        for layout in running:
            made = with_running(
                of_queue,
                here.box,
                made,
                layout,
                allows_approximate=approximate,
                is_wanted_again=layout in wanted,
            )
        if best is None or made.best is None:
            return PlannedLayout(placement.layout, "no layout fits into memory", asked.text, made)
        kept = made.best.prediction and made.best.prediction.kept
        parts = 1 if kept == "sharded" else made.best.layout.parts_of_batches
        if parts < asked.images:  # no more of them are sampled at once
            return self._chosen(model, choice, replace(asked, images=parts), running, room, merges)
        self.past.note(placement.devices, kind, best.layout, made.best.layout)
        first = self._predicted(replace(job, batch=asked.shape[0]), here, approximate).best
        return PlannedLayout(
            made.best.layout,
            here.said,
            asked.text,
            made,
            warm_up,
            here.known,
            here.box.name,
            first_s=first.prediction.seconds if first is not None and first.prediction is not None else None,
            images=asked.images,
        )

    def _predicted(self, job: Job, here: MachineBox, approximate: bool) -> Plan:
        asked = job, here.box, approximate, sizes_here(job, here)
        made = next((made for before, made in list(self._plans) if before == asked), None)
        if made is None:
            made = plan(*asked[:2], allows_approximate=approximate, sizes=asked[3])
            self._plans.append((asked, made))
        return made

    def _here(self, placement: Placement, room: Mapping[str, int]) -> MachineBox:
        own = len(placement.ranks_on("")) or 1
        if placement.machines not in ((), tuple(rank // own for rank in range(len(placement.devices)))):
            raise NotCounted("the devices do not name equally many of each machine, ComfyUI's machine first")
        devices, measured = rank_devices(placement, room), self.measured.links_of(placement)
        here = machine_box(devices, staged=placement.backend == "gloo", measured=measured)
        return over_machines(here, len(placement.devices))


def may_be_approximate(choice: Choice, token_plan: TokenPlan | None) -> bool:
    """Return whether stages may be chosen, and a pipeline can cut such a model."""
    if token_plan is None or not choice.allows_approximate:
        return False
    return bool(token_plan.blocks) and not token_plan.why_no_stages and not token_plan.together.always


def may_replay(token_plan: TokenPlan | None, backend: str) -> bool:
    """Return whether ranks on GPUs may replay CUDA graphs of such a model."""
    if backend != "nccl" or token_plan is None or why_not_recorded(token_plan):
        return False
    return not why_unrecorded(torch.device("cuda"), os.environ)


def sizes_here(job: Job, here: MachineBox) -> tuple[int, ...]:
    """Return how many devices may be chosen. If no speed is known, only the number of all devices,
    because nothing says then that fewer are faster. All sizes are allowed if all devices together
    have nothing to share.
    """
    devices = len(here.box.devices)
    return (devices,) if here.known == "plain" and any(legal_layouts(job, devices)) else sizes_of(devices)


def rank_devices(placement: Placement, room: Mapping[str, int]) -> list[RankDevice]:
    """Describe the devices of this machine's ranks. ``room``: see ``choose``. Ranks on one device
    share its memory, which is rounded by a few MiB, so that like runs are predicted once.
    """
    if not placement.devices[0].is_gpu:
        _available, total = system_memory()
        return [RankDevice("CPU", total, max(1, placement.threads(rank))) for rank in placement.ranks_on("")]
    found = []
    for device in (placement.devices[rank] for rank in placement.ranks_on("")):
        properties = torch.cuda.get_device_properties(device.local_name)
        there = min(properties.total_memory, room.get(device.name, properties.total_memory))
        own = there // placement.devices.count(device) // STEP_BYTES * STEP_BYTES
        found.append(RankDevice(properties.name, own, flops_per_s=device.flops_per_s))
    return found


def provisional(choice: Choice, model: ModelPatcher) -> Choice:
    """Return an open choice with the layout that is used while nothing can be predicted: all
    devices share each image; if the model cannot be cut, each device computes prompts of its own.
    """
    token_plan = plan_or_whole(type(model.model.diffusion_model))
    if not choice.is_open or token_plan is None or token_plan.blocks:
        return choice
    return replace(
        choice,
        placement=replace(choice.placement, layout=in_groups_of_one(choice.placement.layout.world_size)),
    )


def placed(choice: Choice, planned: PlannedLayout) -> Choice:
    """Return the choice with the layout that was chosen for it. If the way to keep weights was left
    open and whole weights do not fit, it gets the planned way too.
    """
    layout, weights = planned.layout, choice.weights
    patching = Patching(layout.stages + 1, planned.warm_up) if layout.stages > 1 else None
    if weights == "auto" and planned.kept != "whole":
        weights = planned.kept
    return replace(
        choice, placement=placement_of(choice, layout), patching=patching, is_open=False, weights=weights
    )


def placement_of(choice: Choice, layout: Layout) -> Placement:
    """Return the devices of a layout's ranks: the first devices of an open choice. The choice's own
    placement is kept if it already has this layout.
    """
    if layout == choice.placement.layout:
        return choice.placement
    return on_devices(layout, choice.placement.devices[: layout.world_size])
