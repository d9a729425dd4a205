"""Compare the first result of each key with a sure result, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch

from ..errors import ModelError, OutOfMemory, PoolSpent, Refused

log = logging.getLogger("pipemesh")
Results = list[torch.Tensor]
Look = tuple[Callable[[], Results], Callable[[], Results]]  # computes a result, and surely right
Off = Callable[[Results, Results], float]  # how far one is from the sure one; 0: rounding


@dataclass(frozen=True)
class FirstResults:
    """Keeps the findings on first results: the keys that are ``right``, and, by the first part of a
    key, the sentence that refuses all results of it because one was ``wrong``. ``notice`` is told
    each thing once.
    """

    right: set[tuple] = field(default_factory=set)
    wrong: dict[Hashable, str] = field(default_factory=dict)
    told: set[Hashable] = field(default_factory=set)
    notice: Callable[[str], None] = log.warning

    def require(self, of: Hashable) -> None:
        """Raises Refused if a first result of this was found wrong."""
        if refusal := self.wrong.get(of):
            raise Refused(refusal)

    def refuse(self, of: Hashable, refusal: str) -> None:
        self.wrong[of] = refusal
        self.require(of)

    def hold(self, key: tuple, what: str, looks: Iterable[Look], off: Off, refusal: str) -> bool:
        """Returns whether a result of this key could be judged. Raises Refused, now and later, if
        the result is ``off`` in every look; ``refusal`` has a place for the deviation. ``what``
        names the result for users. A key that is judged already is not computed again. Raises
        PoolSpent.
        """
        self.require(key[0])
        found = 0.0
        try:
            for compute, compute_surely in looks if key not in self.right else ():
                ours, sure = compute(), compute_surely()
                if not all(bool(one.isfinite().all()) for one in sure):
                    return self.not_judged(what, "one worker makes NaN or infinite numbers of it")
                if not (found := off(ours, sure)):
                    break
        except PoolSpent:  # no pool is left that could go on with what was asked for
            raise
        except (OutOfMemory, ModelError, torch.OutOfMemoryError) as error:
            return self.not_judged(what, str(error))
        if found:
            self.refuse(key[0], refusal.format(f"{found:.1%}"))
        self.right.add(key)
        return True

    def not_judged(self, what: str, why: str, next_time: str = "The next run tries again.") -> bool:
        self.tell(
            (what, next_time),
            f"{what} could not be compared with what one worker makes alone"
            f" ({why.partition(chr(10))[0].rstrip('.')}): compare an image with that of one GPU. {next_time}",
        )
        return False

    def tell(self, of: Hashable, text: str) -> None:
        """Gives each notice once, even if its text has other figures the next time."""
        if of not in self.told:
            self.told.add(of)
            self.notice(text)
