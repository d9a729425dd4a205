"""Time the steps of every sampling, on one GPU and in a pool, so that the two can be compared."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..parallel_runtime.client.pool_marker import InPool
from ..parallel_runtime.layout import Layout
from .bounded_dict import Latest
from .prompt_times import PromptTimes
from .speed_verdict import Slower, StepTime

if TYPE_CHECKING:
    from ..parallel_runtime.client.remote_pool import RemotePool
    from ..parallel_runtime.client.run import Run

TimingKey = tuple[Any, ...]
OF_ALL = 3  # the place, behind the step's own, in which a sampler tells its callback how many steps there are


@dataclass(frozen=True)
class Speed:
    """Seconds of a step of a run. ``one_gpu_s``: of the same step on one GPU, None where that is
    not known; ``measured`` there, else predicted.
    """

    step_s: float
    one_gpu_s: float | None = None
    measured: bool = False

    @property
    def ratio(self) -> float | None:
        return None if self.one_gpu_s is None else self.one_gpu_s / self.step_s


@dataclass(frozen=True)
class Stepped:
    """How far a run is, in the steps of its sampler: ``done`` of ``total``. ``step_s``: of a step;
    None before the second.
    """

    done: int
    total: int
    step_s: float | None = None

    @property
    def left_s(self) -> float | None:
        return None if self.step_s is None else self.step_s * (self.total - self.done)


class StepTimes:
    """Remembers the time of a step for each key (``key_of``). ``predict`` returns how many times as
    long as in the pool a run would take on one GPU, if that can be said without a measurement.
    ``first_step`` is called at the first step of each sampling.
    """

    def __init__(
        self,
        predict: Callable[[Run], float | None] = lambda run: None,
        clock: Callable[[], float] = time.perf_counter,
        first_step: Callable[[], None] = lambda: None,
        prompts: PromptTimes | None = None,
    ):
        self.prompts = prompts or PromptTimes()
        self._predict = predict
        self._clock = clock
        self._first_step = first_step
        self._one_gpu: Latest[TimingKey, StepTime] = Latest()
        self._slower = Slower()
        self._runs: weakref.WeakKeyDictionary[Run, tuple[TimingKey, float]] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Run, Stepped] = weakref.WeakKeyDictionary()

    def watch(self, guider: Any, noise: Any, sampler: Any, callback: Callable | None) -> Steps:
        def called(step: int, *args: Any) -> Any:
            if step == 0:
                self._first_step()
            return callback(step, *args) if callback is not None else None

        return Steps(guider, key_of(guider, noise, sampler), called, self._clock, self._stepped)

    def stepped(self, run: Run) -> Stepped | None:
        """Returns how far a run is, or came; None before its first step."""
        return self._stepped.get(run)

    def note(self, steps: Steps) -> None:
        """Takes the steps of a sampling that is over. The first step is left out: it waits for what
        is loaded. Of images at once each takes its part of the time; where some were given up, none
        is known.
        """
        timed = steps.timed
        if steps.run is not None:
            self.prompts.note_run(steps.run, steps.began, self._clock())
        if timed is None or (steps.run is not None and not (steps.run.queued.at_once and steps.run.images)):
            return
        if steps.run is not None:
            timed = timed.of_one(steps.run.images)
            self._runs[steps.run] = steps.key, timed.step_s
            if steps.layout is not None:
                longer = self._predict(steps.run)
                self._slower.note(
                    steps.key, steps.layout, timed, None if longer is None else timed.times(longer)
                )
        elif steps.is_on_one_gpu:
            self._one_gpu[steps.key] = timed

    def why_slower(self, kind: TimingKey, layout: Layout) -> str:
        """Says that a pool of this layout is slower than one GPU for samplings of this key; empty
        if that is not certain.
        """
        return self._slower.why(kind, layout, self._one_gpu.get(kind))

    def speed_of(self, run: Run) -> Speed | None:
        """Returns how fast a run of a pool was; None before its second step."""
        timed = self._runs.get(run)
        if timed is None:
            return None
        key, step_s = timed
        measured = self._one_gpu.get(key)
        if measured is not None:
            return Speed(step_s, measured.step_s, measured=True)
        longer = self._predict(run)
        return Speed(step_s, None if longer is None else longer * step_s)


class Steps:
    """The callback of one sampling, which notes when each step ends."""

    def __init__(
        self,
        guider: Any,
        key: TimingKey,
        callback: Callable | None,
        clock: Callable[[], float],
        stepped: MutableMapping[Run, Stepped],
    ):
        self.key = key
        self.run: Run | None = None  # of the pool that sampled
        self.layout: Layout | None = None  # of that pool
        self.is_on_one_gpu = True
        self.began = clock()
        self._guider = guider
        self._callback = callback
        self._clock = clock
        self._stepped = stepped
        self._ends: list[float] = []

    def begin(self) -> None:
        """Notes that no step is done."""
        self._ends.clear()
        self.began = self._clock()

    @property
    def has_finished_one(self) -> bool:
        return bool(self._ends)

    @property
    def timed(self) -> StepTime | None:
        return StepTime.of(
            [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        )

    @property
    def step_s(self) -> float | None:
        timed = self.timed
        return timed.step_s if timed is not None else None

    def finish(self) -> None:
        """Notes that the sampling came to its end. Some samplers make fewer steps than they were
        asked for.
        """
        stepped = self._stepped.get(self.run) if self.run is not None else None
        if self.run is not None and stepped is not None:
            self._stepped[self.run] = replace(stepped, done=stepped.total)

    def __call__(self, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 0:  # a sampling that begins anew
            self._ends.clear()
            patcher = self._guider.model_patcher
            pool = pool_of(patcher)
            self.run, self.layout = (pool.runs.last, pool.layout) if pool is not None else (None, None)
            self.is_on_one_gpu = self.run is None and not patcher.get_additional_models_with_key("multigpu")
        self._ends.append(self._clock())
        if self.run is not None and len(args) >= OF_ALL:
            total = args[OF_ALL - 1]
            self._stepped[self.run] = Stepped(min(step + 1, total), total, self.step_s)
        return self._callback(step, *args, **kwargs) if self._callback is not None else None


def pool_of(patcher: Any) -> RemotePool | None:
    return patcher.remote.pool if isinstance(patcher, InPool) else None


def key_of(guider: Any, noise: Any, sampler: Any) -> TimingKey:
    """Returns a key that two samplings share if one GPU takes the same time for both: model, how it
    was loaded, size, sampler, whether there is a negative prompt to evaluate, and how long each
    prompt is, with or without a ControlNet.
    """
    patcher = guider.model_patcher
    init = getattr(patcher, "cached_patcher_init", None)
    model = getattr(getattr(patcher, "model", None), "diffusion_model", None)
    loaded = repr(init[1]) if init is not None else ""
    conds = getattr(guider, "original_conds", None) or {}
    prompts = tuple((name, *map(length_of, several)) for name, several in sorted(conds.items()))
    dtypes = (
        str(getattr(model, "dtype", "")),
        str(getattr(getattr(patcher, "model", None), "manual_cast_dtype", "")),
    )
    function = getattr(sampler, "sampler_function", sampler)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    size, is_alone = tuple(getattr(noise, "shape", ())), getattr(guider, "cfg", 1.0) == 1.0
    return type(model).__name__, loaded, *dtypes, size, name, is_alone, prompts


def length_of(cond: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a prompt's tokens, and whether it has a ControlNet."""
    text = cond.get("cross_attn")
    return text.shape[1] if isinstance(text, torch.Tensor) and text.dim() > 1 else 0, "control" in cond
