"""A pool of stages as what computes one MODEL's patches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple
from typing import Any

import torch

from ..patches import Patch
from ..wire.messages import Part
from .interrupt import interrupted, interrupting
from .remote_model import Client, Ticket


class Pipeline:
    """``model`` is the client's name for it. A branch's first part is the id of the weight patches it is computed under."""

    def __init__(self, client: Client, model: str):
        self._client = client
        self._model = model
        self._run = 0
        self._branches: dict[Hashable, int] = {}

    def begin_run(self) -> None:
        """What the stages keep of the run before is void."""
        self._run = self._client.next_run()
        self._branches.clear()

    def submit(self, arguments: dict[str, Any], branch: tuple, patch: Patch | None) -> Ticket:
        number = self._branches.setdefault(branch, len(self._branches))
        part = Part(self._run, number, astuple(patch) if patch else None)
        return self._client.submit(self._model, branch[0], arguments, branch, part)

    @interrupting
    def collect(self, ticket: Ticket) -> torch.Tensor:
        return self._client.collect(ticket, interrupted)

    def abandon(self) -> None:
        self._client.abandon()
