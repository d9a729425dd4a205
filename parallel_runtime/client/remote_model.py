"""Holds the state that all clones of one parallelized MODEL share: the model in a pool, and its
sampling there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoint import check_mapped
from ..crossing.block_code import runs_code_in_blocks
from ..crossing.source import Source
from ..errors import PipeMeshError, PoolFailed, Refused
from ..weights.background_check import BackgroundCheck
from .groups import InGroups
from .interrupt import held, wait_for
from .memory_needs import Sampled
from .patch_sampling import Patchwise
from .remote_pool import RemotePool
from .run import PooledModel
from .shared_evaluation import Judge


class Remote:
    """Keeps the state that all clones of one parallelized MODEL share.

    ``holds_ui_device``: the part of the weights that ranks on the UI's own device hold;
    ``activations``: their part of the activations of a whole evaluation. ``sampling``: how
    evaluations become patches, if the pool is a pipeline, or go to its groups; ``stages``: how many
    blocks each stage has, if the user says so. ``weights``: how the ranks are to keep them, one of
    ``planner.ways.ASKED``.
    """

    def __init__(
        self,
        pool: RemotePool,
        model: PooledModel,
        source: Source,
        holds_ui_device: float,
        activations: float,
        sampling: Patchwise | InGroups,
        stages: tuple[int, ...] = (),
        weights: str = "whole",
    ):
        self.pool = pool
        self.model = model
        self.source = source
        self.holds_ui_device = holds_ui_device
        self.activations = activations
        self.sampling = sampling
        self.stages = stages
        self.weights = weights
        self.free_bytes: int | None = None  # in the rank that has least, when the run began
        self.sampled: Sampled | None = None  # what this run is of

    def share_of(self, diffusion_model: torch.nn.Module) -> int:
        """Returns the bytes of weights on the UI's own device once ranks have loaded the model, and
        of a run's conditioning there: both go when it is released.
        """
        share = round(self.source.weights.nbytes(diffusion_model) * self.holds_ui_device)
        session, kept = self.pool.sessions.live, 0
        if share and session is not None and self.model in self.pool.runs.models():
            kept = max(memory.conditioning for memory in session.pool.memory)
        held = self.pool.residency.held(self.model)
        if held is not None and held.weights.kept != "whole":
            share = min(share, held.weights.nbytes)
        return kept + share

    def release(self) -> None:
        self.pool.residency.release(self.model)

    def recut(self) -> None:
        """Decides how many blocks each stage has, and how weights are kept."""
        self.pool.residency.recut(self.model, self.stages, self.weights, self.left_free)

    def left_free(self) -> int:
        """Returns the bytes that weights are to leave free on each rank's device."""
        return self.pool.memory_needs.left_free(self.model, self.sampled)

    def begin_run(self) -> None:
        """Begins a run in the pool. Raises Refused for a checkpoint that was overwritten."""
        self.require_same_file()
        with held(self.pool.turn):
            self.pool.runs.begin(self.model)
        if self.model.check is None:  # else it began with the load
            self.check_weights()
        self.recut()
        session = self.pool.sessions.live
        self.free_bytes = session.free_bytes if session is not None else None
        self.sampling.begin_run(self._first)

    def _first(self, shapes: tuple[torch.Size, ...]) -> Judge | None:
        """Returns the judge of the first evaluation of such latents that ranks share; None if none
        is needed, or if no rank can compute the evaluation alone.
        """
        model = self.sampled.model() if self.sampled is not None else None
        judge = self.pool.admission.first(model) if model is not None else None
        if judge is None or model is None or self.sampled is None:
            return None
        why = (
            "a node's code in the blocks may count its evaluations"
            if runs_code_in_blocks(model.current_patcher)
            else self.pool.memory_needs.why_not_alone(self.model, self.sampled, shapes[0][0] if shapes else 1)
        )
        if why:
            self.pool.admission.not_judged(model, why)
        return None if why else judge

    def check_weights(self) -> BackgroundCheck:
        """Begins to compare the UI's weights in full. It ends with the model's run."""
        self.model.end_check()
        check = self.model.check = BackgroundCheck(self.source.weights, self.model.title)
        return check

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, ranks load the model or compute with it, on the pages of its file. Raises Refused
        if the file was overwritten by then, also in place of the death of a rank, of pages that
        the file has lost, and for a weight that a node has written to. Keeps for the report why a
        run cannot go on.
        """
        try:
            try:
                yield
            except PoolFailed:
                self.require_same_file()
                raise
            self.require_same_file()
            if self.model.check is not None:
                self.model.check.require_unchanged()
        except PipeMeshError as error:
            if self.model.run is not None:
                self.model.run.note_fault(error)
            raise

    def require_same_file(self) -> None:
        """Raises Refused if the checkpoint was overwritten while the ranks had it mapped: then they
        hold parts of both files, and release the model.
        """
        try:
            check_mapped(self.source.file)
        except Refused:
            self.release()
            raise

    def sampler_sample(
        self, executor: Any, guider: Any, sigmas: Any, extra_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A SAMPLER_SAMPLE wrapper: the forward only submits evaluations of groups and of patches.
        The code that waits for several evaluations collects them.
        """
        conds, options = self.sampling.conds, extra_args["model_options"]
        with self.computing(), conds.sampling(executor.class_obj, guider, options):
            own = {**extra_args, "model_options": conds.with_windows(options)}
            return executor(guider, sigmas, own, *args, **kwargs)

    def end_run(self) -> None:
        """Ends the run that the model is in, if any: after a run inside a run, the outer one's
        rest. Unless an error ends it, it ends when the model's weights are compared, whoever
        sampled. Raises Refused for one that a node has written to, and ComfyUI's interrupt.
        """
        self.sampled = None
        self.pool.wait.end()
        check = self.model.check
        try:
            if check is not None and sys.exc_info()[1] is check.error_before:
                with self.computing():
                    wait_for(check.require_unchanged)
        finally:
            self.pool.runs.end(self.model)
