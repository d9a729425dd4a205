"""Sampling in patches: how the evaluations of one MODEL become patches, whatever computes them (PipeFusion, arXiv 2405.14430).

Free-running where ``modes`` allows it, one sampler run per patch; else single-timeline: every evaluation's patches are collected before
the sampler goes on. The first evaluations of every branch are whole and exact in both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from greenlet import getcurrent

from ..patches import TokenGrid
from .modes import why_single_timeline
from .timelines import Engine, Timeline, free_run

log = logging.getLogger("pipemesh")
FREE_RUNNING = "free-running"


class Patchwise:
    """Of one MODEL; ``patch_size`` its transformer's, ``patches`` and ``warm_up`` what the user asked for.

    ``notice`` is told the mode of every run, with what keeps the patches together if something does.
    """

    def __init__(self, engine: Engine, patch_size: Any, patches: int, warm_up: int, notice: Callable[[str], None] = log.info):
        self._engine = engine
        self._patch_size = patch_size
        self._patches = patches
        self._warm_up = warm_up
        self._notice = notice
        self._counts: Counter[Hashable] = Counter()

    def begin_run(self) -> None:
        """Between runs, never inside one: what the engine keeps is void."""
        self._counts.clear()
        self._engine.begin_run()

    def sampler_sample(
        self, executor, guider, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False
    ):
        """A SAMPLER_SAMPLE wrapper."""
        reason = why_single_timeline(executor.class_obj, guider, extra_args["model_options"], noise)
        if reason is not None:
            self._notice(f"single-timeline, because of {reason}")
            return executor(guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
        self._notice(FREE_RUNNING)

        def sampler(own_callback: Any, first: bool) -> torch.Tensor:
            quiet = disable_pbar or not first
            return executor(guider, sigmas, dict(extra_args), own_callback, noise, latent_image, denoise_mask, quiet)

        grid = self._grid(noise.shape)
        return free_run(sampler, self._engine, grid, self._patches, self._warm_up, callback, noise.device)

    def evaluate(self, arguments: dict[str, Any], branch: tuple) -> torch.Tensor:
        """One evaluation of the sampler, within a timeline or not."""
        latent = next(iter(arguments.values()))
        key = (*branch, tuple(latent.shape))
        timeline = getcurrent()
        if isinstance(timeline, Timeline):
            return timeline.evaluate(arguments, key)
        number = self._counts[key]
        self._counts[key] += 1
        patches = [None] if number < self._warm_up else self._grid(latent.shape).cut(self._patches)
        try:
            tickets = [self._engine.submit(arguments, key, patch) for patch in patches]
            first, *others = [self._engine.collect(ticket) for ticket in tickets]
        except BaseException:
            self._engine.abandon()
            raise
        return sum(others, first)

    def _grid(self, shape: torch.Size) -> TokenGrid:
        return TokenGrid.of(shape, self._patch_size)


def branch_of(transformer_options: dict[str, Any]) -> tuple:
    """What tells the conds of a run apart, windows of a long video included: what is kept of one must not be seen by another."""
    window = transformer_options.get("context_window")
    frames = tuple(window.index_list) if window is not None else ()
    return (*(str(value) for value in transformer_options.get("uuids", ())), *frames)
