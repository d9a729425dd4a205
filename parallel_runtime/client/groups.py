"""Compute evaluations in groups of ranks: each prompt and each image of a batch in a group of its
own (the cfg and data axes). A pool with one group computes every evaluation in that group.

Positive and negative conds are evaluations of their own, in flight together. If ComfyUI puts
several into one batch, its rows are computed apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch.utils._pytree import tree_map_only

from ..branches import plan_branches
from ..crossing.rows import Constants, NotAlike, batched, joined_outputs, latents_of, take, tensors_in
from ..errors import ModelError, OutOfMemory, PoolSpent
from ..layout import ALONE
from .branch import SampleCall
from .conds import Conds, WithRoom
from .coroutines import RandomState
from .evaluations import Work
from .interrupt import interrupted, interrupting
from .queue_lookahead import Computing, QueueLookahead
from .remote_pool import RemotePool
from .room import tell_of_fresh_workers
from .row_comparison import RowsApart
from .run import PooledModel, Run
from .sampler_arguments import Asked
from .separability import WRAPPER_KEY
from .shared_evaluation import Change, ChooseJudge, SharedEvaluation, as_it_is, nobody


class InGroups:
    """Samples one MODEL on the groups of a pool. ``with_room``: as in ``Conds``; ``can_join``:
    groups can share a sequence of its tokens. ``rows`` compares rows of a batch that are computed
    apart, in place of the run's own check of the first evaluation; None for a model with a plan.
    The first rank also computes the compared evaluation alone. ``ahead`` samples waiting prompts of
    the queue beside the running one, if there are groups of ranks for them; None if nothing is
    sampled ahead.
    """

    can_repeat = True  # ranks keep nothing from one evaluation to the next

    def __init__(
        self,
        pool: RemotePool,
        model: PooledModel,
        with_room: WithRoom,
        can_join: bool = True,
        rows: RowsApart | None = None,
        ahead: QueueLookahead | None = None,
    ):
        self._ahead = ahead
        self._rows = rows
        self._watch: ChooseJudge = rows.watch if rows is not None else nobody
        self._pool = pool
        self._model = model
        self._constants = Constants(pool.layout.groups)
        self._can_join = can_join
        self._plan = lru_cache(maxsize=32)(plan_branches)  # alike in all evaluations of a run, as a rule
        one_group = pool.layout.groups == 1  # it takes the conds as ComfyUI batches them
        self.conds = Conds(self._compute, self._constants, lambda: one_group, with_room)
        self.output_of = self.conds.output_of

    def attach(self, patcher: Any) -> None:
        """Adds its wrapper to a clone of the MODEL."""
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, self.conds.calc_cond_batch)
        if self._ahead is not None and self._pool.layout.parts_of_batches > 1:
            patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, self.sampler_sample)

    def free(self) -> None:
        """Frees the images that were sampled ahead for prompts to come."""
        if self._ahead is not None:
            self._ahead.free()

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
        """A SAMPLER_SAMPLE wrapper, of a pool that computes several images at once: one alone if
        this ComfyUI gives the sampler more than is known.
        """
        assert self._ahead is not None
        if args or kwargs:
            given = guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            return executor(*given, *args, **kwargs)
        asked = Asked(
            executor.class_obj,
            guider,
            sigmas,
            extra_args,
            noise,
            latent_image,
            denoise_mask,
            RandomState(noise.device),
        )
        patcher = guider.model_patcher
        computing = Computing(
            self._pool.layout.parts_of_batches,
            interrupting(self._together),
            lambda calls: self.conds.with_room(patcher, partial(self._compute, calls)),
        )
        tell = partial(setattr, self._pool.runs.of(self._model), "queued")
        return self._ahead.sample(executor, asked, callback, disable_pbar, computing, tell)

    def begin_run(self, watch: ChooseJudge = nobody) -> None:
        """Ranks keep nothing from one evaluation to the next. ``watch`` is asked once, of the first
        evaluation that several ranks compute.
        """
        if self._rows is None:
            self._watch = watch
        else:
            self._rows.begin_run()

    def _compute(self, calls: Sequence[SampleCall]) -> list[Any]:
        pool, run, constants = self._pool, self._pool.runs.of(self._model), self._constants
        batches = tuple(constants.batch_of(call.arguments) for call in calls)
        if self._rows is not None:
            self._rows.require_several(batches, self.conds.prompts)
        session = pool.sessions.live
        speeds = session.group_speeds if session is not None else ()
        held = session.models.get(self._model) if session is not None else None
        # Parts of blocks are gathered within a group
        apart = not self._can_join or (held is not None and held.weights.kept == "sharded")
        plan = self._plan(batches, pool.layout.groups, (1,) if apart else pool.layout.widths, speeds)
        works, pieces_of = [], Counter(share.evaluation for share in plan.shares)
        for number, start, end, group in plan.shares:
            rows, branch = calls[number].arguments, calls[number].branch
            if pieces_of[number] > 1:
                rows = take(rows, start, end, batches[number], constants.names)
                branch = replace(branch, rows=(start, end))
            works.append(Work(rows, branch, pool.layout.members(group, plan.width), plan.width))
        try:
            outputs = pool.evaluations.dispatch(run, works, interrupted, assumes=not constants.together)
        except OutOfMemory:  # which says nothing of rows: with more left free they may be computed
            raise
        except ModelError as error:
            self._judge_failure(run, calls, len(works), error)
            raise
        pieces: list[list[Any]] = [[] for _ in calls]
        works_of: list[list[Work]] = [[] for _ in calls]
        for share, work, output in zip(plan.shares, works, outputs, strict=True):
            pieces[share.evaluation].append(output)
            works_of[share.evaluation].append(work)
        made = [joined_outputs(of_one) for of_one in pieces]
        for call, own, output in zip(calls, works_of, made, strict=True):
            if sum(len(work.ranks) for work in own) > 1 and self._watch is not nobody:
                self._judge(run, call, own, tensors_in(output))
        if len(calls) > 1 and not (batches[0].together or constants.together):
            self._judge_prompts(run, calls[:2], [*works_of[0], *works_of[1]], made[:2])
        return made

    def _together(self, calls: Sequence[SampleCall]) -> list[Any]:
        """Computes the evaluations of several prompts. No other model is released for them, because
        all but the first can wait.
        """
        run = self._pool.runs.of(self._model)
        try:
            outputs = self._compute(calls)
        except PoolSpent as error:  # the first image goes on alone, in the fresh pool that the run may have
            if self._pool.memory_needs.may_start_again(run):
                tell_of_fresh_workers(self._pool, error)
            raise
        evaluations = run.evaluations
        images = len({call.branch.call for call in calls})
        evaluations[-1] = replace(evaluations[-1], images=images)
        return outputs

    def _judge(self, run: Run, call: SampleCall, works: Sequence[Work], made: list[torch.Tensor]) -> None:
        watch = self._watch
        if self._rows is None:
            self._watch = nobody
        judge = watch(shapes_of(call))
        if judge is not None:
            judge(
                SharedEvaluation(
                    made, partial(self._again, run, works), partial(self._again, run, [alone(call)])
                )
            )

    def _judge_prompts(
        self, run: Run, calls: Sequence[SampleCall], works: Sequence[Work], made: Sequence[Any]
    ) -> None:
        """Has two prompts that were computed apart compared with one batch of both, as ComfyUI
        makes it.
        """
        judge = None if self._rows is None else self._rows.watch(shapes_of(calls[0]), "prompts")
        if judge is None or calls[0].branch.window != calls[1].branch.window:
            return
        conds = tuple(cond for call in calls for cond in call.branch.conds)
        with suppress(NotAlike):
            both = batched([call.arguments for call in calls], self._constants.names)
            together = alone(SampleCall(both, replace(calls[0].branch, conds=conds, origins=())))
            again = partial(self._again, run, works), partial(self._again, run, [together])
            judge(SharedEvaluation(tensors_in(joined_outputs(made)), *again))

    def _judge_failure(self, run: Run, calls: Sequence[SampleCall], works: int, error: ModelError) -> None:
        if self._rows is not None and len(calls) < works:
            several = partial(self._again, run, [alone(call) for call in calls])
            self._rows.judge_failure(shapes_of(calls[0]), error, several)

    def _again(
        self,
        run: Run,
        works: Sequence[Work],
        change: Change = as_it_is,
        in_fp32: bool = False,
    ) -> list[torch.Tensor]:
        """Computes the outputs of ``works`` once more, from changed latents. No other model is
        released for a comparison.
        """

        def changed(work: Work) -> Work:
            name, latents = next(iter(work.arguments.items()))
            arguments = {**work.arguments, name: tree_map_only(torch.Tensor, change, latents)}
            return replace(work, arguments=arguments, in_fp32=in_fp32)

        changed_works = [changed(work) for work in works]
        outputs = self._pool.evaluations.dispatch(run, changed_works, interrupted)
        return tensors_in(joined_outputs(outputs))


def shapes_of(call: SampleCall) -> tuple[torch.Size, ...]:
    return tuple(one.shape for one in latents_of(call.arguments))


def alone(call: SampleCall) -> Work:
    """Returns the work of the first rank that computes an evaluation by itself."""
    return Work(call.arguments, call.branch, (0,), ALONE)
