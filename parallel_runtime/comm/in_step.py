"""Keep the ranks of a sequence in step where one of them fails.

A rank that fails goes through the messages that are left of the evaluation, with its wish to stop
and nothing else in them, until all ranks leave together. It knows them from an earlier evaluation
of the same kind. Where a message is new, all ranks ask each other first whether one has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch


class Stopped(BaseException):
    """All ranks leave the forward here. Not an Exception: host code catches those around
    attention.
    """


class Step(NamedTuple):
    """A message, or a decision on the flags that messages brought. ``take`` is given this rank's
    wish to stop, a decision the last flag; it returns the flag that came, if one did.
    """

    name: Hashable
    take: Callable[[torch.Tensor], torch.Tensor | None]
    decides: bool = False


class InStep:
    """The steps of one rank's evaluations. All ranks of the sequence take the same, in one order.

    ``has_failed``: tells the others whether this rank has failed, and returns whether any has; all
    must call it. It decides at once, so it is asked only for what is new.
    """

    def __init__(self, has_failed: Callable[[bool], bool]):
        self._has_failed = has_failed
        self._known: dict[Hashable, list[Step]] = {}
        self._kind: Hashable = None
        self._steps: list[Step] = []  # of this kind of evaluation, as far as one has come
        self._at = 0
        self._flag = torch.zeros(1)  # that came last
        self._is_over = True
        self._is_broken = False

    @property
    def is_even(self) -> bool:
        """Whether this rank has left out no message that others wait for."""
        return self._is_over and not self._is_broken

    def begin(self, kind: Hashable) -> None:
        """Begin an evaluation. ``kind``: evaluations that bear the same one take the same steps, as
        a rule.
        """
        self._kind, self._steps = kind, self._known.get(kind, [])
        self._at, self._is_over, self._is_broken = 0, False, False

    def forget(self) -> None:
        """Forget the steps: the memory of their messages is freed."""
        self._known.clear()
        self._steps = []

    def expect(self, tokens: Hashable) -> None:
        """Note how many tokens the evaluation has. Where it is another number than before, every
        rank takes all messages for new, also one whose own are as long as before.
        """
        self.take(Step(("tokens", tokens), same, decides=True), self._flag)

    def take(self, step: Step, flag: torch.Tensor) -> torch.Tensor:
        """Take the step and return the flag that came. Call it where nothing can fail any more
        before the message is on its way. Raises Stopped on all ranks where one has failed.
        """
        self.enter(step)
        try:
            return self.leave_with(step.take(flag))
        except Stopped:
            self._is_over = True
            raise

    def enter(self, step: Step) -> None:
        """Begin a step that the caller takes; ``leave_with`` the flag ends it."""
        if self._is_over:
            return
        self._reach(step)

    def leave_with(self, flag: torch.Tensor | None) -> torch.Tensor:
        self._at += 1
        self._flag = self._flag if flag is None else flag
        return self._flag

    def _reach(self, step: Step) -> None:
        if self._at < len(self._steps) and self._steps[self._at].name == step.name:
            return
        del self._steps[self._at :]
        if not step.decides and self._has_failed(False):
            self._is_over = True
            raise Stopped
        self._steps.append(step)
        self._known[self._kind] = self._steps

    def end(self) -> None:
        """End an evaluation whose messages have all gone through. Raises as ``take``."""
        if not self._is_over:
            self._reach(Step("end", stop))
            self._is_over = True

    def fail(self) -> None:
        """Go through what is left of the evaluation, for this rank has failed: until all ranks
        leave it, or its end.
        """
        if self._is_over:
            return
        self._is_over, self._is_broken = True, True
        came = self._flag
        try:
            wish = torch.ones_like(came)
            for step in self._steps[self._at :]:
                flag = step.take(came if step.decides else wish)
                came = came if flag is None else flag
            self._has_failed(True)
        except Stopped:
            pass
        except Exception:  # noqa: BLE001 the failure that came first is told
            return
        self._is_broken = False


def stop(_flag: torch.Tensor) -> torch.Tensor:
    raise Stopped


def same(flag: torch.Tensor) -> torch.Tensor:
    return flag
