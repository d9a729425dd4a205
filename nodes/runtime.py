"""The pools of this ComfyUI and the models that run on them: made once per server, when something
asks for it first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfyui_version
from comfy.model_patcher import ModelPatcher

from ..launcher.cache import cache_folder
from ..parallel_runtime.client.alike_prompts import Moment
from ..parallel_runtime.client.interrupt import interrupted
from ..parallel_runtime.client.queue_lookahead import QueueLookahead
from ..parallel_runtime.client.remote_patcher import RemotePatcher, parallelize
from ..parallel_runtime.client.remote_pool import RemotePool
from ..parallel_runtime.client.run import Run
from ..parallel_runtime.client.sampler_arguments import Asked
from ..parallel_runtime.client.shared_evaluation import Admission
from ..parallel_runtime.client.substitute import take_place
from ..parallel_runtime.client.wait import Wait
from ..parallel_runtime.crossing.attention import why_no_parts
from ..parallel_runtime.errors import LayoutError
from ..parallel_runtime.planner.counts import Counts
from ..parallel_runtime.refusals import require_plan
from ..parallel_runtime.wire.messages import TrialStep
from ..pool.counter import Counter
from ..pool.devices import Device, Placement, cost_of_order, visible_gpus
from ..pool.handle import PoolHandle, PoolKeeper
from ..pool.progress import Told
from ..pool.rank_setup import RankSetup, tries_hosts
from ..pool.rendezvous import check_rendezvous
from ..pool.trial.host_trials import FOLDER, HostTrials, Verdicts
from ..pool.trial.process import try_in_process
from .auto.switch import ALL_SOONEST
from .local_devices import all_devices, own_device, why_one_gpu
from .measured_devices import times_links
from .notices import Notices
from .planning import PlannedLayout, Planning, Sampling, placement_of, provisional
from .room import room_on_devices
from .settings import AUTO, BY_HAND, PLACED_BY, Choice, PoolSettings
from .status.sums import longer_alone
from .timing import StepTimes
from .waiting import Waiting

CROWDED = (
    "{} on the CPU, which has {} cores here: more ranks than cores take turns and are slower. Lower the"
    " degrees."
)
UNTRIED = (
    "{} has no token plan, and nobody has tried it on several GPUs: each GPU computes whole images, and"
    " PipeMesh compares the first step with that of one GPU."
)
log = logging.getLogger("pipemesh")


class Teller:
    """Tells how a wait goes on, in the log and on the node that samples. ``show`` puts the text on
    the node if ``wait`` shows no sampling now.
    """

    def __init__(self, wait: Wait, show: Callable[[str], None]):
        self._wait = wait
        self._show = show
        self._logged = ""

    def tell(self, told: Told) -> None:
        if told.text and (told.text != self._logged or not told.total):
            log.info("[PipeMesh] %s", told.text.removeprefix("PipeMesh: "))
        self._logged = told.text
        if not isinstance(self._wait, Waiting) or not self._wait.tell(told):
            self._show(told.line)


class Runtime:
    """Makes choices, and the pools and parallelized models that they name. ``show`` puts a line of
    text on the node that samples, where ``waiting`` does not; ``notices`` are kept for those who
    ask.

    ``moment`` tells what ComfyUI executes, and what waits in its queue; ``looks_ahead`` whether
    prompts of it may be sampled at once where no pool says so.

    ``fault``: why no pool can be started. It is raised when a model is parallelized, so that
    ComfyUI has the nodes all the same.
    """

    def __init__(
        self,
        setup: RankSetup,
        show: Callable[[str], None] = lambda text: None,
        fault: str = "",
        notices: Notices | None = None,
        waiting: Waiting | None = None,
        times: StepTimes | None = None,
        moment: Callable[[], Moment | None] = lambda: None,
        looks_ahead: Callable[[], bool] = lambda: True,
    ):
        self.notices = notices or Notices()
        self.wait = waiting or Wait()
        self._teller = Teller(self.wait, show)
        self.fault = fault
        self._pools: dict[Placement, RemotePool] = {}
        counts = Counts(Counter(setup, partial(device_of_ranks, self.default_choice)).begin, interrupted)
        times = times or StepTimes(self.predicted, first_step=self.wait.came)
        self.planning = Planning(times, counts, ahead=QueueLookahead(moment, looks_ahead))
        self._setup = replace(setup, tell=self._teller.tell, times_links=times_links)
        told = partial(tell_of_restart, self.notices, self.planning.past.led_to)
        self._keeper = PoolKeeper(self._setup, told, self.planning.measured.keep)
        self.trials = host_trials(setup, partial(device_of_ranks, self.default_choice), self.notices)
        self.turn = threading.Lock()  # no run begins in any pool while another thread holds it

    def choose(self, **values: Any) -> Choice:
        """Make the choice that these inputs of PipeMesh Pool stand for. Raises LayoutError."""
        settings = PoolSettings.checked(values)
        placement = self._placed(settings)
        if cores := placement.exceeds_cores:
            self.notices.tell(CROWDED.format(placement.layout.equation(), cores), one_gpu=False)
        if cost := cost_of_order(placement):
            self.notices.tell(cost, one_gpu=False)
        return Choice(
            placement,
            settings.patching(),
            settings.weights,
            settings.allows_approximate,
            settings.layout == AUTO,
            settings.queue == ALL_SOONEST and not placement.other_machines,
        )

    def default_choice(self) -> Choice:
        """Raises LayoutError."""
        return all_devices(self.planning.measured.with_speeds(visible_gpus(comfy.cli_args.args.cpu)))

    def check(self, **values: Any) -> bool | str:
        """Check these inputs as far as their values are known: True, or the sentence that says what
        is wrong. None stands for a linked input, whose value ``choose`` will check when the node
        runs.
        """
        linked = {name for name, value in values.items() if value is None}
        known = {name: value for name, value in values.items() if value is not None}
        try:
            if "layout" in linked:
                PoolSettings.checked({**known, "layout": BY_HAND})
                return True
            settings = PoolSettings.checked(known)
            settings.degrees()
            if not PLACED_BY & linked:
                self._placed(settings)
            settings.patching()
        except LayoutError as error:
            return str(error)
        return True

    def parallelize(
        self, model: ModelPatcher, choice: Choice, left_open: Choice | None = None
    ) -> RemotePatcher:
        """Make a clone of ``model`` that the pool of this choice samples. ``left_open``: the open
        choice that this one was made from, which the next sampling is planned by. Raises
        LayoutError, Refused, ModelError.
        """
        if self.fault:
            raise LayoutError(self.fault)
        choice = provisional(choice, model)
        pool = self._pool(choice.placement)
        self.trials.begin(type(model.model.diffusion_model))
        device = own_device()
        begins = partial(tell_of_mode, self._teller, pool)
        made = parallelize(
            model,
            pool,
            choice.held_on(device),
            choice.patching,
            begins,
            choice.computed_on(device),
            choice.weights,
            self.planning.ahead if self.planning.ahead.is_wanted(choice.looks_ahead) else None,
            can_join=len({*choice.placement.machines}) < 2,
        )
        if not require_plan(model.model.diffusion_model).is_tried and choice.placement.layout.groups > 1:
            self.notices.tell(UNTRIED.format(type(model.model.diffusion_model).__name__), one_gpu=False)
        left_open = left_open or (choice if choice.is_open else None)
        if made is model and self.planning.left_open(model.remote) != left_open:
            made = model.clone()  # by another choice: the one that came in keeps its own
            made.remote = copy(model.remote)
            take_place(made, model)
        self.planning.leave_open(made.remote, left_open)
        return made

    def parallelized(self, model: ModelPatcher, choice: Choice | None) -> ModelPatcher:
        """Make a clone of ``model`` that the pool of this choice samples; without a choice, all
        devices. Without a choice a parallelized model keeps its pool, and on one GPU the model
        itself is returned: a worker would only be in its way. Raises what ``parallelize`` raises, a
        fault on one GPU too.
        """
        if choice is not None:
            return self.parallelize(model, choice)
        if isinstance(model, RemotePatcher):
            return model
        choice = self.default_choice()
        if choice.placement.is_one_gpu and not self.fault:
            self.notices.tell(f"On one GPU: {why_one_gpu()}")
            return model
        return self.parallelize(model, choice)

    def live_placement(self, choice: Choice) -> Placement | None:
        """Return the placement of the live pool that may have been started for this choice; None if
        there is none.
        """
        return next(
            (one for one in list(self._pools) if choice.covers(one) and self._keeper.handle(one).live()), None
        )

    def pool_for(self, choice: Choice) -> RemotePool:
        """Return the live pool of this choice, so that the pool that samples also decodes; else a
        pool with the choice's own placement.
        """
        return self._pool(self.live_placement(choice) or choice.placement)

    def plan(
        self,
        model: ModelPatcher,
        choice: Choice,
        asked: Callable[[], Sampling],
        to_come: Callable[[], Asked] | None = None,
    ) -> PlannedLayout:
        """Choose the layout of an open choice for the sampling that ``asked`` describes.
        ``to_come`` returns the sampler's arguments. The user's wait for the first step begins here,
        because counting a new model takes a moment.
        """
        self.wait.begin()
        choice = provisional(choice, model)
        same = [one for one in list(self._pools) if one == placement_of(choice, one.layout)]
        live = {
            one: pool for one in list(self._pools) if (pool := self._keeper.handle(one).live()) is not None
        }
        room = room_on_devices([(one, pool.memory) for one, pool in live.items()])
        return self.planning.choose(
            model.model,
            choice,
            asked,
            [one.layout for one in same if one in live],
            room,
            merges=not why_no_parts(model),
            to_come=to_come,
        )

    def predicted(self, run: Run) -> float | None:
        """Return how many times as long a run would take on one GPU; None if that is not known."""
        for placement, pool in list(self._pools.items()):
            if any(one is run for one in list(pool.runs.recent)):
                alone = partial(longer_alone, run, placement, self.planning.of(run))
                return run.once("alone", alone)
        return None

    def last_run(self, only: Choice | None = None) -> tuple[PoolHandle, RemotePool, Run] | None:
        """Return the run that began last in a live pool, of all or of ``only`` one, with its pool.
        None if no pool has evaluated anything.
        """
        ran = [
            (handle, pool, run)
            for handle, pool in self.pools(only)
            for run in list(pool.runs.recent)
            if pool.sessions.live is not None and run.evaluations
        ]
        return max(ran, key=lambda one: one[2].began_s, default=None)

    def _placed(self, settings: PoolSettings) -> Placement:
        """Raises LayoutError."""
        placement = settings.place(
            self.planning.measured.with_speeds(visible_gpus(comfy.cli_args.args.cpu)), own_device()
        )
        if placement.other_machines and not self.fault:
            check_rendezvous(self._setup, placement.other_machines[0])
        return placement

    def _pool(self, placement: Placement) -> RemotePool:
        if placement not in self._pools:
            handle, counts = self._keeper.handle(placement), self.planning.counts
            self._pools[placement] = RemotePool(
                handle,
                turn=self.turn,
                wait=self.wait,
                counts=counts,
                beside_ui=placement.ranks_named(own_device()),
                admission=Admission(
                    lambda model: self.trials.admit(
                        type(model.diffusion_model),
                        interrupted,
                        lambda now: self._teller.tell(compared(now)),
                        model,
                    ),
                    partial(self.trials.first, layout=placement.layout),
                    self.trials.not_judged,
                    self.trials.firsts,
                ),
            )
        return self._pools[placement]

    def pools(self, only: Choice | None = None) -> list[tuple[PoolHandle, RemotePool]]:
        """List the pools that were asked for so far, or ``only`` one. May be asked from any
        thread.
        """
        pools = list(self._pools.items())
        return [
            (self._keeper.handle(placement), pool)
            for placement, pool in pools
            if only is None or only.covers(placement)
        ]


def tell_of_mode(teller: Teller, pool: RemotePool, mode: str) -> None:
    """Tell the user how a run in patches, which begins now, is sampled."""
    text = f"PipeMesh samples in patches, {mode}."
    if pool.runs.last is not None:
        pool.runs.last.mode = mode
    teller.tell(Told(text, stays=True))


def device_of_ranks(default_choice: Callable[[], Choice]) -> Device:
    """Return the first device that ranks use by default; the CPU if ComfyUI computes on a device
    that no rank can use.
    """
    try:
        return default_choice().placement.devices[0]
    except LayoutError:
        return Device("cpu")


def host_trials(setup: RankSetup, device: Callable[[], Device], notices: Notices) -> HostTrials:
    return HostTrials(
        Path(setup.comfyui),
        comfyui_version.__version__,
        partial(try_in_process, setup, device) if tries_hosts(os.environ) and setup.comfyui else None,
        Verdicts(cache_folder(os.environ) / FOLDER),
        notice=lambda text: notices.tell(text, one_gpu=False),
    )


def compared(now: TrialStep) -> Told:
    """Say that the pool waits for the comparison of a model class with stock."""
    return Told(
        f"PipeMesh: this ComfyUI's model is compared with stock on the CPU, once ({now.text})",
        now.done,
        now.total,
    )


def tell_of_restart(
    notices: Notices, is_chosen: Callable[[Placement], bool], old: Placement, new: Placement
) -> None:
    """Tell of workers that end because another layout needs their devices: two pools of one
    workflow take turns so, or one pool whose layout is chosen for each sampling.
    """
    move = "If one workflow uses both, connect one pool to all samplers."
    if is_chosen(new):
        move = (
            "Layout auto chose it for the present run: to keep one layout, set layout of PipeMesh Pool to"
            " by hand."
        )
    notices.tell(
        f"Workers are started anew: {new.layout.equation()} needs the devices of {old.layout.equation()}."
        f" {move}",
        one_gpu=False,
    )
