"""Turn the evaluations of one MODEL into patches, whatever computes them (PipeFusion, arXiv
2405.14430).

Free-running where ``separable`` allows it, one sampler run per patch; else single-timeline: every
evaluation's patches are collected before the sampler goes on. The first evaluations of every branch
are whole and exact in both, and all of them where the plan says so. Positive and negative conds are
evaluations of their own, in flight together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from greenlet import getcurrent

from ..crossing.by_name import blocks_left_out
from ..crossing.in_block import why_all_rows
from ..errors import ModelError, NoRoom, OutOfMemory, PoolFailed
from ..families.plan import TokenPlan
from ..patches import Patch, TokenGrid, assembled
from .calls import Calls
from .conds import side_by_side
from .free_gpu import unload_unused
from .separable import (
    WRAPPER_KEY,
    has_foreign_code,
    is_set,
    known_guider,
    must_run_conds_in_sequence,
    why_single_timeline,
    why_whole,
)
from .timelines import Asked, Branch, Cond, PatchBackend, RandomState, Timeline, free_run

log = logging.getLogger("pipemesh")
FREE_RUNNING = "free-running"
# Where its wrappers hang
SAMPLING = (WrappersMP.SAMPLER_SAMPLE, WrappersMP.CALC_COND_BATCH, WrappersMP.PREDICT_NOISE)
MOVED = "; whole where a latent has little in common with that of the evaluation before"


@dataclass(frozen=True)
class Patching:
    """Says how a pipeline samples: the number of ``patches``, how many first evaluations of every
    cond are whole and exact, and the number of blocks of each stage (empty: balanced).
    """

    patches: int
    warm_up: int = 1
    stages: tuple[int, ...] = ()


class Patchwise:
    """Samples one MODEL in patches. ``patch_size`` and ``plan`` are its transformer's; ``patches``
    and ``warm_up`` the user's.

    ``notice`` gets the mode of every run, and the reason where it is not free-running.
    """

    def __init__(
        self,
        backend: PatchBackend,
        patch_size: Any,
        plan: TokenPlan,
        patches: int,
        warm_up: int,
        notice: Callable[[str], None] = log.info,
    ):
        if warm_up < 1:
            raise ModelError(
                f"warm_up {warm_up}: patches need the keys and values of a whole evaluation before them, so"
                " choose 1 or more."
            )
        self._backend = backend
        self._patch_size = patch_size
        self._plan = plan
        self._text = 0  # tokens that go with the first patch in this run
        self._patches = patches
        self._warm_up = warm_up
        self._notice = notice
        self._calls = Calls()
        self._looks_at_all = False  # whether a patch of a node needs all tokens in this run
        self._begun = False  # True once the sampler has got an output of this run

    def attach(self, patcher: Any) -> None:
        """Adds its wrappers to a clone of the MODEL."""
        patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, self.sampler_sample)
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, self.calc_cond_batch)
        # Ours is outermost: what it calls is of one evaluation
        inside = patcher.wrappers.get(WrappersMP.PREDICT_NOISE, {})
        patcher.wrappers[WrappersMP.PREDICT_NOISE] = {WRAPPER_KEY: [self.predict_noise], **inside}

    def begin_run(self) -> None:
        """Makes void what the backend keeps. Call between runs, never inside one."""
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
    ):
        """A SAMPLER_SAMPLE wrapper."""
        self._text = text_tokens(guider.conds) if len(self._plan.streams) > 1 else 0
        options = extra_args["model_options"].get("transformer_options", {})
        self._looks_at_all = bool(why_all_rows(self._plan, options))
        whole = why_whole(self._plan, guider.conds, options)
        reason = whole or why_single_timeline(
            executor.class_obj, guider, extra_args["model_options"], noise, self._plan.together.refiners
        )
        together = "all of them at once" if whole else "single-timeline"
        mode = f"{together}, because of {reason}" if reason else FREE_RUNNING
        self._notice(mode)
        cuts = not whole and has_foreign_code(executor.class_obj, guider, extra_args["model_options"])
        self._calls.watch((lambda: self._notice(f"{mode}{MOVED}")) if cuts else None)

        def once() -> torch.Tensor:
            return executor(
                guider, sigmas, dict(extra_args), callback, noise, latent_image, denoise_mask, disable_pbar
            )

        def sampler(own_callback: Any, first: bool) -> torch.Tensor:
            quiet = disable_pbar or not first
            return executor(
                guider, sigmas, dict(extra_args), own_callback, noise, latent_image, denoise_mask, quiet
            )

        def free() -> torch.Tensor:
            grid, patches = self._cut(noise.shape)
            return free_run(sampler, self._backend, grid, patches, self._warm_up, callback, noise.device)

        try:
            return self._making_room(once if reason else free, guider, noise.device)
        finally:
            self._calls.watch(None)

    def _making_room(
        self, run: Callable[[], torch.Tensor], guider: Any, device: torch.device
    ) -> torch.Tensor:
        """Calls ``run``, and again from its beginning where there was no room for its first
        evaluation and other memory could be freed: other models of the pool, then, once, the models
        that ComfyUI holds on its own GPU.
        """
        random, host_asked = RandomState(device), False
        while True:
            try:
                return run()
            except (NoRoom, OutOfMemory):
                if self._begun:
                    raise
                if not self._backend.make_room():
                    if host_asked or not unload_unused(guider, is_known=known_guider(guider)):
                        raise
                    host_asked = True
            random.restore()
            self.begin_run()

    def predict_noise(self, executor, x, *args, **kwargs):
        """A PREDICT_NOISE wrapper."""
        self._calls.begin_evaluation(x)
        return executor(x, *args, **kwargs)

    def calc_cond_batch(self, executor, model, conds, x, timestep, model_options):
        """A CALC_COND_BATCH wrapper."""
        several = sum(cond is not None for cond in conds) > 1
        if (
            not several
            or self._looks_at_all
            or must_run_conds_in_sequence(model.current_patcher, conds, model_options)
        ):
            return executor(model, conds, x, timestep, model_options)
        return side_by_side(executor, (model, conds, x, timestep, model_options), self._evaluate)

    def evaluate(self, arguments: dict[str, Any], branch: tuple, weights: str = "") -> torch.Tensor:
        """Computes one evaluation of the sampler, inside a timeline or not. ``weights``: the id of
        the weight patches it is computed under.
        """
        latent = next(iter(arguments.values()))
        latents = latent if isinstance(latent, list) else [latent]
        asked = (
            arguments,
            self._calls.own_branch(
                Branch((*branch, *(tuple(one.shape) for one in latents)), weights), latents
            ),
        )
        cond = getcurrent()
        if isinstance(cond, Cond):
            return cond.evaluate(asked)
        return self._evaluate([asked])[0]

    def _evaluate(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        timeline = getcurrent()
        reloaded = self._backend.restart_if_reloaded()
        if isinstance(timeline, Timeline):
            if reloaded:
                raise PoolFailed(
                    "The model was unloaded, or its workers lost, while its patches were on their way: run"
                    " again."
                )
            outputs = timeline.evaluate(asked)
            self._begun = True
            return outputs
        if reloaded:
            self._calls.begin_run()  # warm again
        try:
            tickets = [
                [self._backend.submit(*one, patch) for patch in self._patches_of(*one)] for one in asked
            ]
            outputs = [[self._backend.collect(ticket) for ticket in one] for one in tickets]
        except BaseException:
            self._backend.abandon()
            raise
        self._begun = True
        return [assembled(patches, self._plan.leaves_behind_blocks) for patches in outputs]

    def _patches_of(self, arguments: dict[str, Any], branch: Branch) -> Sequence[Patch | None]:
        """The patches of the next evaluation of ``branch``; None is all of it."""
        number = self._calls.count(branch)
        together = self._plan.together
        uncut = (
            together.always
            or self._looks_at_all
            or any(is_set(arguments.get(name)) for name in together.arguments)
        )
        whole = uncut or number < self._warm_up
        return (None,) if whole else self._cut(next(iter(arguments.values())).shape)[1]

    def _cut(self, shape: torch.Size) -> tuple[TokenGrid, tuple[Patch, ...]]:
        grid = TokenGrid.of(shape, self._patch_size)
        return grid, grid.cut(self._patches, self._text)


def text_tokens(conds: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> int:
    """Tokens of the longest prompt."""
    texts = [cond.get("model_conds", {}).get("c_crossattn") for side in conds.values() for cond in side or ()]
    return max((text.cond.shape[1] for text in texts if text is not None), default=0)


def branch_of(transformer_options: dict[str, Any]) -> tuple:
    """Identifies a cond of a run, the window of a long video, and blocks that are left out, so that
    the K/V buffers of one are never used for another. ComfyUI gives the negative that it makes for
    a region the region's id.
    """
    window = transformer_options.get("context_window")
    frames = tuple(window.index_list) if window is not None else ()
    conds = zip(
        transformer_options.get("uuids", ()), transformer_options.get("cond_or_uncond", ()), strict=False
    )
    return (*(f"{cond} {side}" for cond, side in conds), *frames, *blocks_left_out(transformer_options))
