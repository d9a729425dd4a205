"""What is on its way through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..patches import Part
from ..wire.arena import Frame


@dataclass(frozen=True, eq=False)
class Written:
    """The arguments of an evaluation as they lie in the arena."""

    arguments: dict[str, Any]
    tree: bytes
    frame: Frame


@dataclass(frozen=True, eq=False)
class Ticket:
    """Of a submission: its request, and the arena's memory that it holds until it is collected."""

    number: int
    model: str
    written: Written
    out: Frame
    device: torch.device
    began: float
    part: Part
