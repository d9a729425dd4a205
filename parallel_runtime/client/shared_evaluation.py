"""Compare an evaluation that several ranks computed with the same evaluation on one rank. An output
is given as the list of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .first_results import FirstResults

Change = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(latent: torch.Tensor) -> torch.Tensor:
    return latent


class Recompute(Protocol):
    """Computes an evaluation once more, from changed latents; ``in_fp32``: in fp32, whatever the
    dtype of the weights.
    """

    def __call__(self, change: Change = as_it_is, in_fp32: bool = False) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class SharedEvaluation:
    """An evaluation that several ranks computed, with its outputs ``made``. ``again`` has the same
    ranks compute it once more, ``alone`` one rank by itself.
    """

    made: list[torch.Tensor]
    again: Recompute
    alone: Recompute


Judge = Callable[[SharedEvaluation], None]  # raises Refused
ChooseJudge = Callable[[tuple[torch.Size, ...]], Judge | None]  # who judges an evaluation of such latents


@dataclass(frozen=True)
class Admission:
    """Whether ranks may compute a BaseModel. ``load`` is called before they load it, and may raise
    Refused, or RunCancelled while it waits. ``first`` returns the judge of the first evaluation
    that they share; None if none is needed. ``not_judged`` is told why that judge was not asked.
    ``firsts`` keeps first results of models without a token plan; its notice also takes other
    messages to users about a run that goes on.
    """

    load: Callable[[Any], None] = lambda model: None
    first: Callable[[Any], Judge | None] = lambda model: None
    not_judged: Callable[[Any, str], None] = lambda model, why: None
    firsts: FirstResults = field(default_factory=FirstResults)


def nobody(_shapes: tuple[torch.Size, ...]) -> None:
    """Nothing is compared."""
