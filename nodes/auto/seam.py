"""The one place where PipeMesh replaces methods of ComfyUI's: ``CFGGuider.sample``, which every
sampler node calls, stock or foreign, and ``outer_sample``, which tells of guiders that do without.

At ``sample``, not in the constructor: ComfyUI keeps guiders between prompts, so that one made while
the switch was off may be sampled while it is on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import comfy.samplers

from ...parallel_runtime.errors import PipeMeshError
from ..timing import Steps, StepTimes

SAMPLERS = "comfy.samplers"
NEEDED = (  # function of comfy.samplers, names that its code has to use
    ("CFGGuider.__init__", ("model_patcher",)),
    ("CFGGuider.sample", ("model_patcher", "prepare_model_patcher", "outer_sample")),
    ("CFGGuider.outer_sample", ("model_patcher", "prepare_sampling", "pre_run", "cleanup")),
    ("KSampler.sample", ("sample",)),
    ("sample", ("CFGGuider", "sample")),
)

# Of CFGGuider.sample, the first ones
ARGUMENTS = ("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback")


@dataclass(frozen=True)
class Run:
    """The stock method with its arguments, and the steps that it has done since it was called
    last.
    """

    stock: Callable[[], Any]
    steps: Steps

    def __call__(self) -> Any:
        self.steps.begin()
        return self.stock()


class HostChanged(PipeMeshError):
    """ComfyUI samples in another way than auto mode knows."""


class GuiderSeam:
    """Installs and removes both methods together.

    ``sample`` is called with the guider, its noise, its sigmas and the stock method; ``unseen``
    with a guider that comes to ``outer_sample`` without having come to ``sample``. ``times`` gets
    the steps of every sampling.
    """

    def __init__(
        self, sample: Callable[[Any, Any, Any, Run], Any], unseen: Callable[[Any], None], times: StepTimes
    ):
        self._times = times
        self._sample = sample
        self._unseen = unseen
        self._stock: dict[str, Callable] = {}
        self._ours: dict[str, Callable] = {}
        self._inside: list[Any] = []  # guiders that sample now, the innermost last

    def install(self) -> None:
        """Raises HostChanged, and leaves ComfyUI as it is, where it looks otherwise than known."""
        if not self._ours:
            require_known_host()
            guider = comfy.samplers.CFGGuider
            self._stock = {name: vars(guider)[name] for name in ("sample", "outer_sample")}
            self._ours = {"sample": self._around_sample(), "outer_sample": self._around_outer_sample()}
            for name, method in self._ours.items():
                setattr(guider, name, method)

    def remove(self) -> None:
        """Puts ComfyUI's own methods back. A method that another pack has wrapped since stays in
        place, and calls ComfyUI's.
        """
        guider = comfy.samplers.CFGGuider
        for name, method in self._ours.items():
            if vars(guider)[name] is method:
                setattr(guider, name, self._stock[name])
        self._ours = {}

    def _around_sample(self) -> Callable:
        stock = self._stock["sample"]

        @functools.wraps(stock)
        def sample(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._ours:
                return stock(guider, *args, **kwargs)
            given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            steps = self._times.watch(guider, given.get("noise"), given.get("sampler"), given.get("callback"))
            args, kwargs = with_callback(args, kwargs, steps)
            self._inside.append(guider)
            try:
                run = Run(functools.partial(stock, guider, *args, **kwargs), steps)
                output = self._sample(guider, given.get("noise"), given.get("sigmas"), run)
                steps.finish()
                return output
            finally:
                self._inside.pop()
                self._times.note(steps)

        return sample

    def _around_outer_sample(self) -> Callable:
        stock = self._stock["outer_sample"]

        @functools.wraps(stock)
        def outer_sample(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ours and not any(guider is one for one in self._inside):
                self._unseen(guider)
            return stock(guider, *args, **kwargs)

        return outer_sample


def with_callback(args: tuple, kwargs: dict[str, Any], callback: Callable) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments with another callback, given as the other was: by its place or name."""
    place = ARGUMENTS.index("callback")
    if len(args) > place:
        return (*args[:place], callback, *args[place + 1 :]), kwargs
    return args, {**kwargs, "callback": callback}


def require_known_host() -> None:
    """Raises HostChanged, naming what differs, where ComfyUI's samplers are not as auto mode knows
    them. Methods that another pack has replaced are not looked into.
    """
    for path, names in NEEDED:
        found: Any = comfy.samplers
        for part in path.split("."):
            found = vars(found).get(part)
            if found is None:
                raise changed(f"has no {SAMPLERS}.{path}")
        code = inspect.unwrap(found)
        if getattr(code, "__module__", None) == SAMPLERS:
            missing = [name for name in names if name not in code.__code__.co_names]
            if missing:
                raise changed(f"does not use {missing[0]} in {SAMPLERS}.{path}")
            if path == "CFGGuider.sample":
                require_known_arguments(path, code)


def require_known_arguments(path: str, method: Callable) -> None:
    """Raises HostChanged where others than ``ARGUMENTS`` come first: they may be given by place."""
    given = tuple(inspect.signature(method).parameters)[1:]  # without self
    for ours, own in zip_longest(ARGUMENTS, given[: len(ARGUMENTS)]):
        if ours != own:
            raise changed(f"has {own or 'nothing'} in the place of {ours} in {SAMPLERS}.{path}")


def changed(what: str) -> HostChanged:
    return HostChanged(
        f"Auto mode does not know this ComfyUI, which {what}: update PipeMesh, or put PipeMesh Parallelize"
        " into the graph."
    )
