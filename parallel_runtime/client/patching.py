from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patching:
    """Says how a pipeline samples: the number of ``patches``, how many first evaluations of every
    cond are whole and exact, and the number of blocks of each stage (empty: balanced).
    """

    patches: int
    warm_up: int = 1
    stages: tuple[int, ...] = ()
