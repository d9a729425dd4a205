"""Where auto mode stands in ComfyUI: before ``CFGGuider.sample``, which every sampler node calls,
stock or foreign; ``outer_sample``, which tells of guiders that do without; and the four methods of
a ``VAE`` that nodes call, and the node that upscales.

At ``sample``, not in the constructor: ComfyUI keeps guiders between prompts, so that one made while
the switch was off may be sampled while it is on.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import comfy.samplers
import comfy.sd

import nodes

from ..timing import Steps, StepTimes
from .replaced import HostChanged, Replaced, changed, require_uses

__all__ = ["GuiderSeam", "HostChanged", "Run", "UpscalerSeam", "VAESeam"]

SAMPLERS = "comfy.samplers"
NEEDED = (  # function of comfy.samplers, names that its code has to use
    ("CFGGuider.__init__", ("model_patcher",)),
    ("CFGGuider.sample", ("model_patcher", "prepare_model_patcher", "outer_sample")),
    ("CFGGuider.outer_sample", ("model_patcher", "prepare_sampling", "pre_run", "cleanup")),
    ("KSampler.sample", ("sample",)),
    ("sample", ("CFGGuider", "sample")),
)

Use = Callable[[Any, str, Any, Callable[[Any], Any]], Any]
Note = Callable[[str, float, bool], None]

USED = {"patcher", "scale", "load_models_gpu", "tiled_scale", "raise_non_oom"}  # by the node
UPSCALER, OF_UPSCALERS = "ImageUpscaleWithModel", ("execute", "upscale")
UPSCALE = "upscale"  # the name of the work, whichever of them is called
OF_VAES = ("decode", "decode_tiled", "encode", "encode_tiled")
# Of CFGGuider.sample, the first ones
ARGUMENTS = (
    *("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback"),
    *("disable_pbar", "seed"),
)


@dataclass(frozen=True)
class Run:
    """The stock method, the arguments that it is ``given``, by name, and the steps that it has done
    since it was called last.
    """

    stock: Callable[[], Any]
    steps: Steps
    given: Mapping[str, Any]

    def __call__(self) -> Any:
        self.steps.begin()
        return self.stock()


class GuiderSeam:
    """Installs and removes both methods together.

    ``sample`` is called with the guider and the stock method; ``unseen`` with a guider that comes
    to ``outer_sample`` without having come to ``sample``. ``times`` gets the steps of every
    sampling.
    """

    def __init__(self, sample: Callable[[Any, Run], Any], unseen: Callable[[Any], None], times: StepTimes):
        self._times = times
        self._sample = sample
        self._unseen = unseen
        self._inside: list[Any] = []  # guiders that sample now, the innermost last
        self._methods = Replaced(
            comfy.samplers.CFGGuider,
            {"sample": self._around_sample, "outer_sample": self._around_outer_sample},
        )

    def install(self) -> None:
        """Raises HostChanged, and leaves ComfyUI as it is, where it looks otherwise than known."""
        if not self._methods.are_in:
            require_known_host()
            self._methods.put_in()

    def remove(self) -> None:
        self._methods.take_out()

    def _around_sample(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def sample(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._methods.are_in:
                return stock(guider, *args, **kwargs)
            given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            steps = self._times.watch(guider, given.get("noise"), given.get("sampler"), given.get("callback"))
            args, kwargs = with_callback(args, kwargs, steps)
            self._inside.append(guider)
            try:
                run = Run(functools.partial(stock, guider, *args, **kwargs), steps, given)
                output = self._sample(guider, run)
                steps.finish()
                return output
            finally:
                self._inside.pop()
                self._times.note(steps)

        return sample

    def _around_outer_sample(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def outer_sample(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if self._methods.are_in and not any(guider is one for one in self._inside):
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
    require_uses(comfy.samplers, NEEDED)
    sample = inspect.unwrap(comfy.samplers.CFGGuider.sample)
    if sample.__module__ == SAMPLERS:
        require_known_arguments("CFGGuider.sample", sample)


def require_known_arguments(path: str, method: Callable) -> None:
    """Raises HostChanged where others than ``ARGUMENTS`` come first: they may be given by place."""
    given = tuple(inspect.signature(method).parameters)[1:]  # without self
    for ours, own in zip_longest(ARGUMENTS, given[: len(ARGUMENTS)]):
        if ours != own:
            raise changed(f"has {own or 'nothing'} in the place of {ours} in {SAMPLERS}.{path}")


class VAESeam:
    """``use`` is called with a VAE, the name of its method, what that is given, and the stock
    method, of any VAE; ``note`` with that name, its seconds, and whether ranks computed it.
    """

    def __init__(self, use: Use, note: Note = lambda work, seconds, in_pool: None):
        self._use = use
        self._note = note
        self._methods = Replaced(comfy.sd.VAE, {name: self._around for name in OF_VAES})

    def install(self) -> None:
        """Raises HostChanged, and leaves ComfyUI as it is, where it looks otherwise than known."""
        require_uses(comfy.sd, [(f"VAE.{name}", ("patcher", "load_models_gpu")) for name in OF_VAES])
        self._methods.put_in()

    def remove(self) -> None:
        self._methods.take_out()

    def _around(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def method(vae: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._methods.are_in:
                return stock(vae, *args, **kwargs)
            given = next(iter((*args, *kwargs.values())), None)

            def timed(vae: Any) -> Any:
                began = time.perf_counter()
                output = stock(vae, *args, **kwargs)
                in_pool = "remote" in vars(getattr(vae, "first_stage_model", vae))
                self._note(stock.__name__.partition("_")[0], time.perf_counter() - began, in_pool)
                return output

            return self._use(vae, stock.__name__, given, timed)

        return method


class UpscalerSeam:
    """``use`` and ``note`` are called as by ``VAESeam``. Other packs call the node's
    ``upscale``.
    """

    def __init__(self, use: Use, note: Note = lambda work, seconds, in_pool: None):
        self._use = use
        self._note = note
        self._methods: Replaced | None = None

    def install(self) -> None:
        """Raises HostChanged, and leaves ComfyUI as it is, where it looks otherwise than known."""
        node = vars(nodes)["NODE_CLASS_MAPPINGS"].get(UPSCALER)
        if self._methods is not None or node is None:  # such as with --disable-all-custom-nodes
            return
        for name in OF_UPSCALERS:
            stock = vars(node).get(name)
            code = getattr(getattr(stock, "__func__", None), "__code__", None)
            if not isinstance(stock, classmethod) or code is None or not {*code.co_names} >= USED:
                raise changed(f"has another {UPSCALER}.{name}")
        self._methods = Replaced(node, {name: self._around for name in OF_UPSCALERS})
        self._methods.put_in()

    def remove(self) -> None:
        if self._methods is not None:
            self._methods.take_out()
            self._methods = None

    def _around(self, stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def execute(node: Any, upscale_model: Any, image: Any) -> Any:
            def call(model: Any) -> Any:
                began = time.perf_counter()
                output = stock.__func__(node, model, image)
                if model.scale:  # else ranks are being given its tiles
                    self._note(UPSCALE, time.perf_counter() - began, model is not upscale_model)
                return output

            if self._methods is None:
                return call(upscale_model)
            return self._use(upscale_model, UPSCALE, image, call)

        return classmethod(execute)
