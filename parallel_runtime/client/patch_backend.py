"""Compute one model's patches in a pool of stages."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from ..comfy_bridge.interrupt import interrupted, interrupting
from ..patches import Part, Patch
from .evaluations import one_thread
from .remote_pool import RemotePool
from .session import Ticket
from .timelines import Branch


class PipelineBackend:
    """Computes the patches of a model that a pipeline holds: a ``PatchBackend``. ``model``: its
    name in the pool.
    """

    def __init__(self, pool: RemotePool, model: str):
        self._pool = pool
        self._model = model
        self._load: int | None = None  # of the model's loads, the one that this run's K/V buffers belong to

    def begin_run(self) -> None:
        self._pool.runs.restart(self._pool.runs.of(self._model))
        self._load = None

    def restart_if_reloaded(self) -> bool:
        load, self._load = self._load, self._pool.residency.loads[self._model]
        if load in (None, self._load):
            return False
        self._pool.runs.restart(self._pool.runs.of(self._model))
        return True

    def submit(self, arguments: dict[str, Any], branch: Branch, patch: Patch | None) -> Ticket:
        run = self._pool.runs.of(self._model)
        part = Part(run.id, run.number_of(branch), astuple(patch) if patch else None)
        with one_thread():
            return self._pool.evaluations.submit(run, branch.weights, arguments, branch.conds, part)

    @interrupting
    def collect(self, ticket: Ticket) -> torch.Tensor:
        return self._pool.evaluations.collect(ticket, interrupted)

    def make_room(self) -> bool:
        return self._pool.residency.make_room(self._model)

    def abandon(self) -> None:
        self._pool.evaluations.abandon()
