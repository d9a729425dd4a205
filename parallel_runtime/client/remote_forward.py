"""The forward that takes the place of a transformer's own, and wrappers that bring every evaluation
to it. They also keep ComfyUI's model compiler away from it: newer ComfyUIs record the allocations
of a forward in the thread that samples, and replay them, but this forward allocates differently in
every step, and several may be in flight. Read: comfy/model_prefetch.py of ComfyUI 0.38.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import comfy.cli_args
import comfy.model_prefetch
import torch
from comfy.patcher_extension import WrappersMP

from ..errors import Refused
from ..forward import forward_binder, forward_name
from ..refusals import ON_ONE_GPU, patch_name
from ..stand_ins import StandIn, standing_in
from ..watch.model_changes import refused_change
from ..watch.python_file import LIBRARIES, compiled_elsewhere, root_of
from .separability import foreign_wrappers

BETWEEN = (
    *(WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH),
    *(WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL),
)  # kinds of wrappers between the sampler and the transformer
NO_COMPILER = "disable_comfy_compiler"  # an option of newer ComfyUIs


class RemoteForward:
    """Takes the place of the transformer's own forward for as long as its patcher is the loaded
    one. ``calls`` counts the evaluations that came here. ``watch`` belongs to the patcher: held
    here, it would keep the model alive that holds the forward.
    """

    def __init__(self, patcher: Any, name: str):
        self._patcher = weakref.ref(patcher)
        self._bind = forward_binder(patcher.model.diffusion_model, name)
        # A recording that this thread is in leaves allocations out
        self._paused = getattr(comfy.model_prefetch, "pause_malloc_graph", nullcontext)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patcher = self._patcher()
        if patcher is None:
            raise RuntimeError(
                "The parallelized MODEL is gone while its forward is still in place: run the workflow again."
            )
        self.calls += 1
        if patcher.watch is not None:
            patcher.watch.check()
        with self._paused():
            return patcher.sample_call(self._bind(args, kwargs))

    def require_unchanged(self) -> None:
        """Raises Refused for a change that was made to the transformer in place since it was
        loaded.
        """
        patcher = self._patcher()
        if patcher is not None and patcher.watch is not None:
            patcher.watch.check()


def in_place_of_forward(model: Any) -> Any:
    """Returns the function that was put in the place of the transformer's own forward; None if
    there is none.
    """
    return vars(model.diffusion_model).get(forward_name(model.diffusion_model))


def apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """An APPLY_MODEL wrapper. Raises Refused if the transformer was evaluated by other code than
    the remote forward. A cache may skip it, but not in the first evaluation of a run.
    """
    model = executor.class_obj
    forward = in_place_of_forward(model)
    if not isinstance(forward, RemoteForward):
        if forward is not None:
            what = f"has its method {forward_name(model.diffusion_model)} replaced in place"
            raise refused_change("", what, forward)
        return executor(*args, **kwargs)
    before = forward.calls
    output = executor(*args, **kwargs)
    if forward.calls == before:
        forward.require_unchanged()
        if not before:
            raise _unused(model.current_patcher)
    return output


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, ComfyUI begins no recording: by its own option, which is put back."""
    args = comfy.cli_args.args
    with standing_in(args, NO_COMPILER, StandIn) if hasattr(args, NO_COMPILER) else nullcontext():
        yield  # a stand-in counts as true


def outer_sample(
    executor: Any,
    noise: Any,
    latent_image: Any,
    sampler: Any,
    sigmas: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An OUTER_SAMPLE wrapper; ComfyUI's compiler is off inside. Raises Refused after a run that
    asked the pool for nothing, if a node's code stands between the sampler and the model.
    """
    with uncompiled():
        output = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
    patcher = executor.class_obj.model_patcher
    forward = in_place_of_forward(patcher.model)
    if isinstance(forward, RemoteForward) and not forward.calls and len(sigmas) > 1 and any(between(patcher)):
        raise _unused(patcher)
    return output


def between(patcher: Any) -> list[Any]:
    """Yields the code of nodes between the sampler and the transformer."""
    options = patcher.model_options
    wrappers = [options.get("model_function_wrapper"), options.get("sampler_calc_cond_batch_function")]
    wrappers += [
        value
        for name, value in patcher.object_patches.items()
        if callable(getattr(type(patcher.model), name, None))
    ]
    foreign = list(foreign_wrappers(patcher.wrappers))
    for kind in BETWEEN:
        wrappers += [wrapper for of_kind, wrapper in foreign if of_kind == kind]
    wrappers.append(
        compiled_elsewhere(getattr(type(patcher.model.diffusion_model), "forward", None), LIBRARIES)
    )
    return [wrapper for wrapper in wrappers if wrapper is not None]


def set_later(patcher: Any, option: str) -> str:
    """Names the sampler that may have set an option since it was called, or the code between it and
    the transformer; empty for an option that was there before.
    """
    given = patcher.remote.sampling.conds.given
    if given is None or option in given.options:
        return ""
    sampler, others = getattr(given.sampler, "sampler_function", given.sampler), between(patcher)
    is_hosts = root_of(sampler) == "comfy"
    names = [] if is_hosts and others else [f"the sampler {patch_name(sampler)}"]
    return " or ".join([*names, *map(patch_name, others)])


def _unused(patcher: Any) -> Refused:
    names = ", ".join(patch_name(wrapper) for wrapper in between(patcher))
    by = f" by {names}" if names else ""
    return Refused(
        f"This MODEL was evaluated{by} without its transformer's forward, so nothing ran in the pool: "
        f"remove the node that takes the forward's place, or {ON_ONE_GPU}."
    )


WRAPPERS: dict[str, Callable] = {WrappersMP.APPLY_MODEL: apply_model, WrappersMP.OUTER_SAMPLE: outer_sample}
