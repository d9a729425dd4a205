"""Take the conds of one evaluation to the transformer side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent

from ..crossing.rows import Constants
from .branch import Compute, Origin, SampleCall, origins_by_cond
from .coroutines import Coroutine, in_flight_together
from .separability import has_foreign_code, is_hosts_own, must_run_conds_in_sequence
from .windows import WindowsTogether, can_be_together

WithRoom = Callable[[Any, Callable[[], list[Any]]], list[Any]]


class Given(NamedTuple):
    """A sampler, the names of the ``transformer_options`` with which it was called, and the guider
    that called it.
    """

    sampler: Any
    options: frozenset[str]
    guider: Any = None


class Conds:
    """Brings the calls of the transformer to ``compute``: one by itself, or one of each cond
    together. ``constants`` learns what ComfyUI does not batch. ``in_sequence`` says when conds
    cannot be computed together. ``with_room`` calls the function that computes them together, for a
    clone of the MODEL.
    """

    def __init__(
        self,
        compute: Compute,
        constants: Constants,
        in_sequence: Callable[[], bool],
        with_room: WithRoom = lambda _, compute: compute(),
    ):
        self._compute = compute
        self.with_room = with_room
        self._constants = constants
        self._in_sequence = in_sequence
        self._is_known = False  # all code of the run at hand
        self._origins: dict[str, Origin] = {}
        self.prompts = 0  # conds of all sides of the evaluation at hand
        self.given: Given | None = None  # to the sampler that is in the loop

    @contextmanager
    def sampling(self, sampler: Any, guider: Any, model_options: dict[str, Any]) -> Iterator[None]:
        """Inside, conditioning is identified by the conds' own tensors, if all code between the
        conds and the transformer is ComfyUI's.
        """
        outer, names = self.given, model_options.get("transformer_options", {}).keys()
        self._is_known = not has_foreign_code(sampler, guider, model_options) and is_hosts_own(
            guider.model_patcher.model
        )
        self.given = Given(sampler, frozenset(names), guider)
        try:
            yield
        finally:
            self._is_known, self._origins, self.given = False, {}, outer

    def with_windows(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns a run's model options. If there are several groups, they compute context windows
        together.
        """
        handler, groups = options.get("context_handler"), self._constants.groups
        if groups == 1 or not can_be_together(handler):
            return options
        return {**options, "context_handler": WindowsTogether(handler, self._must_wait, self._beside, groups)}

    def calc_cond_batch(self, executor, model, conds, x, timestep, model_options, *args, **kwargs):
        """A CALC_COND_BATCH wrapper: computes ComfyUI's batch of conds, each side by itself, but
        the next calls of all sides together.
        """
        patcher = model.current_patcher
        self._constants.look(patcher, conds)
        present = [index for index, cond in enumerate(conds) if cond is not None]
        self.prompts = sum(len(conds[index]) for index in present)
        has_state = must_run_conds_in_sequence(patcher, conds, model_options)
        self._origins = origins_by_cond(conds) if self._is_known and not has_state else {}
        if len(present) < 2 or self._in_sequence() or has_state:
            return executor(model, conds, x, timestep, model_options, *args, **kwargs)

        def alone(index: int) -> torch.Tensor:
            only = [cond if number == index else None for number, cond in enumerate(conds)]
            return executor(model, only, x, timestep, model_options, *args, **kwargs)[index]

        outputs = self._beside([partial(alone, index) for index in present], patcher)
        by_index = dict(zip(present, outputs, strict=True))
        return [by_index[index] if index in by_index else torch.zeros_like(x) for index in range(len(conds))]

    def output_of(self, call: SampleCall) -> Any:
        """Returns the output of one call. If its cond runs beside others, the call waits until each
        other cond has made a call.
        """
        current, known = getcurrent(), [self._origins.get(name) for name in call.branch.conds]
        origins = tuple(origin for origin in known if origin is not None)
        if len(origins) == len(known):
            call = replace(call, branch=replace(call.branch, origins=origins))
        return (current.outputs_of if isinstance(current, Coroutine) else self._compute)([call])[0]

    def _must_wait(self, patcher: Any, conds: Any, model_options: dict[str, Any]) -> bool:
        return self._in_sequence() or must_run_conds_in_sequence(patcher, conds, model_options)

    def _beside(self, runs: Sequence[Callable[[], Any]], patcher: Any) -> list[Any]:
        def compute(calls: Sequence[SampleCall]) -> list[Any]:
            # In a window, whose conds wait for those of others
            if isinstance(current := getcurrent(), Coroutine):
                return current.outputs_of(calls)
            return self.with_room(patcher, lambda: self._compute(calls))

        return in_flight_together(runs, compute)
