"""A pool of stages as what computes one MODEL's patches."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from ..comfy_bridge.interrupt import interrupted, interrupting
from ..patches import Part, Patch
from .remote_model import Client, Ticket
from .timelines import Branch


class Pipeline:
    """``model`` is the client's name for it."""

    def __init__(self, client: Client, model: str):
        self._client = client
        self._model = model
        self._run = 0
        self._branches: dict[Branch, int] = {}
        self._load: int | None = None  # of the client's loads of the model, the one that this run began on

    def begin_run(self) -> None:
        """What the stages keep of the run before is void."""
        self._run = self._client.next_run()
        self._branches.clear()
        self._load = None

    def restart_if_reloaded(self) -> bool:
        """The model was loaded anew in mid-run: ComfyUI unloaded it, or the pool was lost."""
        load, self._load = self._load, self._client.loads_of(self._model)
        if load in (None, self._load):
            return False
        self._run = self._client.next_run()
        return True

    def submit(self, arguments: dict[str, Any], branch: Branch, patch: Patch | None) -> Ticket:
        number = self._branches.setdefault(branch, len(self._branches))
        part = Part(self._run, number, astuple(patch) if patch else None)
        return self._client.submit(self._model, branch.weights, arguments, branch.conds, part)

    @interrupting
    def collect(self, ticket: Ticket) -> torch.Tensor:
        return self._client.collect(ticket, interrupted)

    def make_room(self) -> bool:
        return self._client.make_room(self._model)

    def abandon(self) -> None:
        self._client.abandon()
