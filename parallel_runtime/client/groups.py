"""Compute the branches of an evaluation, and the images of a batch, in groups of ranks of their own
(the cfg and data axes).

Positive and negative conds are evaluations of their own, in flight together. Where ComfyUI puts
several into one batch, its rows are computed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy.patcher_extension import WrappersMP
from greenlet import getcurrent

from ..branches import plan_branches
from ..comm.shares import group_speeds
from ..crossing.rows import Constants, put_together, take
from .conds import side_by_side
from .evaluations import Work
from .interrupt import interrupted, interrupting
from .remote_pool import RemotePool
from .separable import WRAPPER_KEY, must_run_conds_in_sequence
from .timelines import Asked, Branch, Cond


class InGroups:
    """Samples one MODEL on the groups of a pool. ``model``: its name there; ``can_join``: groups
    can share a sequence of its tokens.
    """

    def __init__(self, pool: RemotePool, model: str, constants: Constants, can_join: bool = True):
        self._pool = pool
        self._model = model
        self._constants = constants
        self._can_join = can_join

    def attach(self, patcher: Any) -> None:
        """Adds its wrapper to a clone of the MODEL."""
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, self.calc_cond_batch)

    def begin_run(self) -> None:
        """Ranks keep nothing from one evaluation to the next."""

    def calc_cond_batch(self, executor, model, conds, x, timestep, model_options):
        """A CALC_COND_BATCH wrapper."""
        several = sum(cond is not None for cond in conds) > 1
        if not several or must_run_conds_in_sequence(model.current_patcher, conds, model_options):
            return executor(model, conds, x, timestep, model_options)
        return side_by_side(executor, (model, conds, x, timestep, model_options), self._evaluate)

    def evaluate(self, arguments: dict[str, Any], branch: tuple, weights: str = "") -> Any:
        """Computes one evaluation, beside those of other conds or alone. ``weights``: the id of the
        weight patches it is computed under.
        """
        asked = (arguments, Branch(branch, weights))
        cond = getcurrent()
        return cond.evaluate(asked) if isinstance(cond, Cond) else self._evaluate([asked])[0]

    @interrupting
    def _evaluate(self, asked: Sequence[Asked]) -> list[Any]:
        pool, run, constants = self._pool, self._pool.runs.of(self._model), self._constants.names
        batches = [self._constants.batch_of(arguments) for arguments, _ in asked]
        speeds = group_speeds(pool.speeds, pool.layout.groups)
        plan = plan_branches(batches, pool.layout.groups, self._widths(), speeds)
        works = []
        for number, start, end, group in plan.shares:
            (arguments, branch), batch = asked[number], batches[number]
            own = () if end - start == batch.rows else (start, end)
            rows = take(arguments, start, end, batch, constants)
            works.append(
                Work(
                    rows,
                    (*branch.conds, *own),
                    branch.weights,
                    pool.layout.members(group, plan.width),
                    plan.width,
                )
            )
        outputs = pool.evaluations.evaluate(run, works, interrupted)
        pieces: list[list[Any]] = [[] for _ in asked]
        for share, output in zip(plan.shares, outputs, strict=True):
            pieces[share.evaluation].append(output)
        return [put_together(of_one) for of_one in pieces]

    def _widths(self) -> tuple[int, ...]:
        """Returns the numbers of neighbouring groups that can share a sequence of this model: parts
        of blocks are gathered within a group.
        """
        session, widths = self._pool.session, self._pool.layout.widths
        held = session.models.get(self._model) if session is not None else None
        apart = not self._can_join or (held is not None and held.weights.kept == "sharded")
        return widths[:1] if apart else widths
