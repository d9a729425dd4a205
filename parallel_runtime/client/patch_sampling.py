"""Turn the evaluations of one MODEL into patches, whatever computes them (PipeFusion, arXiv
2405.14430).

Patches run ahead of each other (free-running) if ``separability`` allows it: one sampler runs per
patch. Else the run is single-timeline: all patches of an evaluation are collected before the
sampler goes on. The first evaluations of every branch are whole and exact in both modes, and all
evaluations if the plan says so. Positive and negative conds are evaluations of their own, in flight
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from ..crossing.block_code import why_all_rows
from ..errors import ModelError, NoRoom, OutOfMemory, PoolSpent
from ..families.plan import TokenPlan
from ..patches import Patch, TokenGrid, assembled
from .branch import SampleCall
from .calls import Calls
from .conds import Conds, WithRoom
from .coroutines import RandomState
from .cpu_sampling import CPU, arguments_on_cpu, draws_there, guider_on_cpu, on_cpu, on_device
from .free_gpu import unload_unused
from .patching import Patching
from .separability import (
    WRAPPER_KEY,
    has_foreign_code,
    is_set,
    known_guider,
    why_single_timeline,
    why_whole,
)
from .shared_evaluation import ChooseJudge, nobody
from .timelines import FreeRun, PatchBackend

log = logging.getLogger("pipemesh")
FREE_RUNNING = "free-running"
# Where its wrappers hang
SAMPLING = (WrappersMP.SAMPLER_SAMPLE, WrappersMP.CALC_COND_BATCH, WrappersMP.PREDICT_NOISE)
MOVED = "; whole if a latent has little in common with that of the evaluation before"


@dataclass(frozen=True)
class PatchedRun:
    """How a run is sampled. ``text``: tokens that go with the first patch; ``looks_at_all``: a
    patch of a node needs all tokens. ``can_repeat``: an evaluation can be computed again, whole, as
    one sampler samples all patches; else it relies on keys and values of those before it, and on
    where other patches are.
    """

    text: int = 0
    looks_at_all: bool = False
    can_repeat: bool = False


class Patchwise:
    """Samples one MODEL in patches. ``patch_size`` and ``plan`` are its transformer's,
    ``patching`` the user's.

    ``notice`` gets the mode of every run, and the reason if it is not free-running.
    """

    def __init__(
        self,
        backend: PatchBackend,
        patch_size: Any,
        plan: TokenPlan,
        patching: Patching,
        notice: Callable[[str], None] = log.info,
        with_room: WithRoom = lambda _, compute: compute(),
    ):
        if patching.warm_up < 1:
            raise ModelError(
                f"warm_up {patching.warm_up}: patches need the keys and values of a whole evaluation before"
                " them, so choose 1 or more."
            )
        self._backend = backend
        self._patch_size = patch_size if isinstance(patch_size, int) else tuple(patch_size)
        self._plan = plan
        self._sampled = PatchedRun()
        self._patching = patching
        self._notice = notice
        self._calls = Calls()
        self._begun = False  # True once the sampler has got an output of this run
        self.conds = Conds(self._compute, backend.constants, lambda: self._sampled.looks_at_all, with_room)

    def attach(self, patcher: Any) -> None:
        """Adds its wrappers to a clone of the MODEL."""
        patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, self.sampler_sample)
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, self.conds.calc_cond_batch)
        # Ours is outermost: what it calls is of one evaluation
        inside = patcher.wrappers.get(WrappersMP.PREDICT_NOISE, {})
        patcher.wrappers[WrappersMP.PREDICT_NOISE] = {WRAPPER_KEY: [self.predict_noise], **inside}

    @property
    def can_repeat(self) -> bool:
        return self._sampled.can_repeat

    def free(self) -> None:
        """Has nothing that outlives a run."""

    def begin_run(self, watch: ChooseJudge = nobody) -> None:
        """Discards all data that the backend keeps. Call it between runs, never inside a run.
        ``watch`` can only write to the log here: no rank has all blocks, so none can compute a
        whole evaluation alone.
        """
        watch(())
        self._calls.begin_run()
        self._begun = False
        self._backend.begin_run()

    def sampler_sample(
        self,
        executor,
        guider,
        sigmas,
        extra_args,
        callback,
        noise,
        latent_image=None,
        denoise_mask=None,
        disable_pbar=False,
        *args,
        **kwargs,
    ):
        """A SAMPLER_SAMPLE wrapper."""
        text = text_tokens(guider.conds) if len(self._plan.streams) > 1 else 0
        options = extra_args["model_options"].get("transformer_options", {})
        whole = why_whole(self._plan, guider.conds, options)
        reason = whole or why_single_timeline(
            executor.class_obj, guider, extra_args["model_options"], noise, self._plan.together.refiners
        )
        together = "all of them at once" if whole else "single-timeline"
        beside = not reason and self._backend.beside_ui and noise.device != CPU
        draws = draws_there(executor.class_obj) if beside else ""
        stays = f"{FREE_RUNNING}; on the GPU, where {draws} draws its noise" if draws else FREE_RUNNING
        mode = f"{together}, because of {reason}" if reason else stays
        self._sampled = PatchedRun(text, bool(why_all_rows(self._plan, options)), bool(reason))
        self._notice(mode)
        cuts = not whole and has_foreign_code(executor.class_obj, guider, extra_args["model_options"])
        self._calls.watch((lambda: self._notice(f"{mode}{MOVED}")) if cuts else None)

        def sampler(own_callback: Any, first: bool) -> torch.Tensor:
            quiet = disable_pbar or not first
            given = guider, sigmas, dict(extra_args), own_callback, noise, latent_image, denoise_mask, quiet
            return executor(*given, *args, **kwargs)

        def free() -> torch.Tensor:
            cut = self._cut(noise.shape)
            free_run = FreeRun(self._backend, *cut, self._patching.warm_up, noise.device)
            return free_run.run(sampler, callback, self._has_begun)

        run, device, of_user = partial(sampler, callback, True) if reason else free, noise.device, guider
        if beside and not draws:
            guider, extra_args = guider_on_cpu(guider), arguments_on_cpu(extra_args)
            sigmas, noise, latent_image, denoise_mask = on_cpu([sigmas, noise, latent_image, denoise_mask])
            callback = callback and on_device(callback, device)
        try:
            return self._making_room(run, of_user, device).to(device)
        finally:
            self._calls.watch(None)

    def _making_room(
        self, run: Callable[[], torch.Tensor], guider: Any, device: torch.device
    ) -> torch.Tensor:
        """Calls ``run``. If its first evaluation did not fit and other memory could be freed, calls
        it again from its beginning: other models of the pool go first, then, once, the models that
        ComfyUI holds on its own GPU.
        """
        random, host_asked = RandomState(device), False
        while True:
            try:
                return run()
            except (NoRoom, OutOfMemory) as error:
                if self._begun or (isinstance(error, PoolSpent) and not self._backend.may_start_again()):
                    raise
                if not self._backend.make_room():
                    if host_asked or not unload_unused(guider, is_known=known_guider(guider)):
                        raise
                    host_asked = True
                if isinstance(error, PoolSpent):
                    self._backend.tell_of_fresh_workers(error)
            random.restore()
            self.begin_run()

    def predict_noise(self, executor, x, *args, **kwargs):
        """A PREDICT_NOISE wrapper."""
        self._calls.begin_evaluation(x)
        return executor(x, *args, **kwargs)

    def output_of(self, call: SampleCall) -> torch.Tensor:
        """Returns the output of one call by the sampler, inside a timeline or not."""
        latent = next(iter(call.arguments.values()))
        latents = latent if isinstance(latent, list) else [latent]
        shaped = replace(call.branch, shapes=tuple(tuple(one.shape) for one in latents))
        return self.conds.output_of(SampleCall(call.arguments, self._calls.own_branch(shaped, latents)))

    def _compute(self, calls: Sequence[SampleCall]) -> list[torch.Tensor]:
        if self._backend.restart_if_reloaded():
            self._calls.begin_run()  # warm again
        try:
            tickets = [
                [self._backend.submit(call, patch) for patch in self._patches_of(call)] for call in calls
            ]
            outputs = [[self._backend.collect(ticket) for ticket in one] for one in tickets]
        except BaseException:
            self._backend.abandon()
            raise
        self._begun = True
        return [assembled(patches, self._plan.leaves_behind_blocks) for patches in outputs]

    def _has_begun(self) -> None:
        self._begun = True

    def _patches_of(self, call: SampleCall) -> Sequence[Patch | None]:
        """Returns the patches of the next evaluation of a branch; [None] means the whole
        evaluation.
        """
        arguments, number = call.arguments, self._calls.count(call.branch)
        together = self._plan.together
        uncut = (
            together.always
            or self._sampled.looks_at_all
            or any(is_set(arguments.get(name)) for name in together.arguments)
        )
        whole = uncut or number < self._patching.warm_up
        return (None,) if whole else self._cut(next(iter(arguments.values())).shape)[1]

    def _cut(self, shape: torch.Size) -> tuple[TokenGrid, tuple[Patch, ...]]:
        return cut_latent(shape, self._patch_size, self._patching.patches, self._sampled.text)


@lru_cache(maxsize=32)
def cut_latent(
    shape: torch.Size, patch_size: int | tuple[int, ...], patches: int, text: int
) -> tuple[TokenGrid, tuple[Patch, ...]]:
    """Cuts a latent of this shape, as all evaluations of a run have it."""
    grid = TokenGrid.of(shape, patch_size)
    return grid, grid.cut(patches, text)


def text_tokens(conds: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> int:
    """Tokens of the longest prompt."""
    texts = [cond.get("model_conds", {}).get("c_crossattn") for side in conds.values() for cond in side or ()]
    return max((text.cond.shape[1] for text in texts if text is not None), default=0)
