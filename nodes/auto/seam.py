"""Puts auto mode into ComfyUI: before ``CFGGuider.sample``, which every sampler node calls, stock
or foreign; before ``outer_sample`` and ``inner_sample``, to notice guiders that skip ``sample``;
before the four methods of a ``VAE`` that nodes call; and before the node that upscales.

``CFGGuider.sample`` is replaced and not the constructor, because ComfyUI keeps guiders between
prompts: a guider that was made while the switch was off may be sampled while it is on.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import comfy.samplers
import comfy.sd

import nodes

from ...parallel_runtime.errors import PipeMeshError
from ..timing import Steps, StepTimes

SAMPLERS = "comfy.samplers"
NEEDED = (  # function of comfy.samplers, names that its code has to use
    ("CFGGuider.__init__", ("model_patcher",)),
    ("CFGGuider.sample", ("model_patcher", "prepare_model_patcher", "outer_sample")),
    ("CFGGuider.outer_sample", ("model_patcher", "prepare_sampling", "pre_run", "cleanup", "inner_sample")),
    ("CFGGuider.inner_sample", ("inner_model",)),
    ("KSampler.sample", ("sample",)),
    ("sample", ("CFGGuider", "sample")),
)

Around = Callable[[Any], Any]  # the stock method -> what stands before it
Use = Callable[[Any, str, Any, Callable[[Any], Any]], Any]
NoteSeconds = Callable[[str, float, bool], None]

USED = {"patcher", "scale", "load_models_gpu", "tiled_scale", "raise_non_oom"}  # by the node
UPSCALER, OF_UPSCALERS = "ImageUpscaleWithModel", ("execute", "upscale")
UPSCALE = "upscale"  # the name of the work, whichever of them is called
UNSEEN = ("outer_sample", "inner_sample")  # of a guider, on the way from sample to the sampler
OF_VAES = ("decode", "decode_tiled", "encode", "encode_tiled")
OF_NODE = ("upscale_model", "image")  # arguments of the node that upscales
# Of CFGGuider.sample, the first ones
ARGUMENTS = (
    *("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback"),
    *("disable_pbar", "seed"),
)


@dataclass(frozen=True)
class StockCall:
    """One call of a stock method. ``given`` holds its arguments by name, ``steps`` the steps that
    it has done since it was last called.
    """

    stock: Callable[[], Any]
    steps: Steps
    given: Mapping[str, Any]

    def __call__(self) -> Any:
        self.steps.begin()
        return self.stock()


class HostChanged(PipeMeshError):
    """ComfyUI computes in another way than auto mode knows."""


class Seam:
    """Puts methods into a class of ComfyUI's, and takes them out together. Another pack may have
    wrapped one of ours since: that one stays, and calls ComfyUI's own once ``is_in`` is false.
    ``owner`` is None if this ComfyUI has no such class.
    """

    def __init__(self, owner: type | None, around: Mapping[str, Around]):
        self._owner = owner
        self._around = around
        self._stock: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    @property
    def is_in(self) -> bool:
        return bool(self._ours)

    def install(self) -> None:
        """Replaces the methods. Raises HostChanged, and leaves ComfyUI as it is, if ComfyUI's code
        is not the known one.
        """
        if self.is_in or self._owner is None:
            return
        self.require_known(self._owner)
        self._stock = {name: vars(self._owner)[name] for name in self._around}
        self._ours = {name: around(self._stock[name]) for name, around in self._around.items()}
        for name, method in self._ours.items():
            setattr(self._owner, name, method)

    def require_known(self, owner: type) -> None:
        """Raises HostChanged with the name of the first difference from the known ComfyUI. Methods
        that another pack has replaced are not examined.
        """
        raise NotImplementedError

    def remove(self) -> None:
        for name, method in self._ours.items():
            if vars(self._owner)[name] is method:
                setattr(self._owner, name, self._stock[name])
        self._ours = {}


class GuiderSeam(Seam):
    """``sample`` is called with the guider and the stock method; ``unseen`` with a guider that
    comes to ``outer_sample`` or ``inner_sample`` without having come to ``sample``. ``times`` gets
    the steps of every sampling.
    """

    def __init__(
        self, sample: Callable[[Any, StockCall], Any], unseen: Callable[[Any], None], times: StepTimes
    ):
        around = {"sample": self._around_sample, **dict.fromkeys(UNSEEN, self._around_unseen)}
        super().__init__(comfy.samplers.CFGGuider, around)
        self._times = times
        self._sample = sample
        self._unseen = unseen
        self._inside: list[Any] = []  # guiders that sample now, the innermost last

    def require_known(self, owner: type) -> None:
        require_uses(comfy.samplers, NEEDED)
        sample = inspect.unwrap(vars(owner)["sample"])
        if sample.__module__ != SAMPLERS:
            return
        given = tuple(inspect.signature(sample).parameters)[1:]  # without self
        for ours, own in zip_longest(ARGUMENTS, given[: len(ARGUMENTS)]):  # they may be given by place
            if ours != own:
                raise changed(f"has {own or 'nothing'} in the place of {ours} in {SAMPLERS}.CFGGuider.sample")

    def _around_sample(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def sample(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_in:
                return stock(guider, *args, **kwargs)
            given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            steps = self._times.watch(guider, given.get("noise"), given.get("sampler"), given.get("callback"))
            args, kwargs = with_argument(ARGUMENTS, "callback", steps, args, kwargs)
            self._inside.append(guider)
            try:
                run = StockCall(functools.partial(stock, guider, *args, **kwargs), steps, given)
                output = self._sample(guider, run)
                steps.finish()
                return output
            finally:
                self._inside.remove(guider)
                self._times.note(steps)

        return sample

    def _around_unseen(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def method(guider: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_in and not any(guider is one for one in self._inside):
                self._unseen(guider)
                self._inside.append(guider)  # told of once on its way in
                try:
                    return stock(guider, *args, **kwargs)
                finally:
                    self._inside.remove(guider)
            return stock(guider, *args, **kwargs)

        return method


def with_argument(
    names: Sequence[str], name: str, value: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a function that begin with these ``names``, one of them another,
    given as it was: by its place or name.
    """
    place = names.index(name)
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def require_uses(module: Any, needed: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises HostChanged if a function of ComfyUI's ``module`` is missing, or does not use the
    names that it is known to use. The error names the difference. Functions that another pack has
    replaced are not examined.
    """
    for path, names in needed:
        found: Any = module
        for part in path.split("."):
            found = vars(found).get(part)
            if found is None:
                raise changed(f"has no {module.__name__}.{path}")
        code = inspect.unwrap(found)
        if getattr(code, "__module__", None) == module.__name__:
            missing = [name for name in names if name not in code.__code__.co_names]
            if missing:
                raise changed(f"does not use {missing[0]} in {module.__name__}.{path}")


def changed(what: str) -> HostChanged:
    return HostChanged(
        f"Auto mode does not know this ComfyUI, which {what}: update PipeMesh, or put PipeMesh Parallelize"
        " into the graph."
    )


class VAESeam(Seam):
    """Calls ``use`` in place of the stock methods of every VAE, with the VAE, the name of the
    method, the method's argument and the stock method. ``note`` is called with that name, the
    seconds that it took, and whether ranks computed it.
    """

    def __init__(self, use: Use, note: NoteSeconds = lambda work, seconds, in_pool: None):
        super().__init__(comfy.sd.VAE, dict.fromkeys(OF_VAES, self._around_work))
        self._use = use
        self._note = note

    def require_known(self, owner: type) -> None:
        require_uses(comfy.sd, [(f"VAE.{name}", ("patcher", "load_models_gpu")) for name in OF_VAES])

    def _around_work(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def method(vae: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_in:
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


class UpscalerSeam(Seam):
    """``use`` and ``note`` are called as by ``VAESeam``. Other packs call the node's
    ``upscale``.
    """

    def __init__(self, use: Use, note: NoteSeconds = lambda work, seconds, in_pool: None):
        node = vars(nodes)["NODE_CLASS_MAPPINGS"].get(UPSCALER)  # None as with --disable-all-custom-nodes
        super().__init__(node, dict.fromkeys(OF_UPSCALERS, self._around_work))
        self._use = use
        self._note = note

    def require_known(self, owner: type) -> None:
        for name in OF_UPSCALERS:
            stock = vars(owner).get(name)
            code = getattr(getattr(stock, "__func__", None), "__code__", None)
            if not isinstance(stock, classmethod) or code is None or not {*code.co_names} >= USED:
                raise changed(f"has another {UPSCALER}.{name}")

    def _around_work(self, stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def execute(node: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(OF_NODE, args, strict=False)), **kwargs}
            if not self.is_in or not given.keys() >= {*OF_NODE}:
                return stock.__func__(node, *args, **kwargs)
            upscale_model, image = (given[name] for name in OF_NODE)

            def timed(model: Any) -> Any:
                began = time.perf_counter()
                places, names = with_argument(OF_NODE, OF_NODE[0], model, args, kwargs)
                output = stock.__func__(node, *places, **names)
                if model.scale:  # else ranks are being given its tiles
                    self._note(UPSCALE, time.perf_counter() - began, model is not upscale_model)
                return output

            return self._use(upscale_model, UPSCALE, image, timed)

        return classmethod(execute)
