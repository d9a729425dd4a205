"""What holds an evaluation that several ranks computed to what one rank makes of it by itself.
Outputs are the tensors in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# What one rank makes of an evaluation by itself, whose latents were changed so
Alone = Callable[[Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]
Judge = Callable[[list[torch.Tensor], Alone], None]  # of what several ranks made. Raises Refused
Watch = Callable[[tuple[torch.Size, ...]], Judge | None]  # who judges an evaluation of such latents


@dataclass(frozen=True)
class Admission:
    """Whether ranks may compute a BaseModel. ``load`` is called before they load it, and may raise
    Refused, or RunCancelled while it waits. ``first`` returns who judges the first evaluation that
    they share; None where nobody has to.
    """

    load: Callable[[Any], None] = lambda model: None
    first: Callable[[Any], Judge | None] = lambda model: None


def as_it_is(latent: torch.Tensor) -> torch.Tensor:
    return latent


def nobody(_shapes: tuple[torch.Size, ...]) -> None:
    """Nothing is compared."""
