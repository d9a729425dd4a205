"""Keep the ranks of a sequence in step where one of them fails.

A rank that fails goes through the messages that are left of the evaluation, with its wish to stop
and nothing else in them, until all ranks leave together. It has to know them, from an earlier
evaluation of the same kind. Ranks rely on what they know only where all of them know the same: the
request says so, or all ask each other once, before the first message. Else they learn the steps,
and ask each other before every message whether one has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch

KEPT_KINDS = 32  # of evaluations, of one model, from run to run
DECISION, TOKENS, END = "decision", "tokens", "end"
SILENT = (DECISION, TOKENS)  # no rank waits for another


class Stopped(BaseException):
    """All ranks leave the forward here. Not an Exception: host code catches those around
    attention.
    """


class Step(NamedTuple):
    """A message along ``axis``, a decision on the flags that messages brought, or how many tokens
    there are. Names, counts and indices alone: a step outlives the tensors that it moves.
    """

    axis: str
    what: Hashable = None


class Expected(NamedTuple):
    """What a request tells of the steps to come. Evaluations of one model that bear the same
    ``kind`` take the same, as a rule.

    ``confirmed``: the evaluation in which all its ranks learned them. All have told that they know
    them, and have had memory for the messages since. 0: nobody knows of that. ``lasts``: whether
    the next evaluation of this kind takes the same steps.
    """

    kind: Hashable = ()
    confirmed: int = 0
    lasts: bool = True


class Mover(Protocol):
    """What moves the messages of one axis."""

    axis: str
    in_step: InStep | None

    def make_room(self, what: Hashable) -> None:
        """Have the memory that the message takes."""

    def go_through(self, what: Hashable, flag: torch.Tensor) -> torch.Tensor | None:
        """Take part in the message with whatever lies in its memory; return the flag that came, if
        one did.
        """


class KnownSteps:
    """What a rank knows of the steps of one model's evaluations. It belongs to the model, for as
    long as its weights are kept as they are.

    Steps are named by the number of the evaluation in which they were learned. That is the same on
    all its ranks, and they learned the same in it.
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, int] = {}  # by kind, the latest last
        self._steps: dict[int, list[Step]] = {}
        self._changing: set[Hashable] = set()

    def number_of(self, kind: Hashable) -> int:
        """Return which steps are to come, 0 where that is not known."""
        return 0 if kind in self._changing else self._learned.get(kind, 0)

    def steps_of(self, number: int) -> list[Step]:
        return self._steps.get(number, [])

    def learn(self, kind: Hashable, number: int, steps: list[Step]) -> None:
        self._learned.pop(kind, None)
        self._learned[kind], self._steps[number] = number, steps

    def change(self, kind: Hashable) -> None:
        """Note that an evaluation took other steps than one of its kind before. In this run no rank
        relies on them any more.
        """
        self._changing.add(kind)

    def end_run(self) -> None:
        """Forget what was learned longest ago, where it is much."""
        self._changing.clear()
        for kind in list(self._learned)[:-KEPT_KINDS]:
            del self._learned[kind]
        self._steps = {number: self._steps[number] for number in self._learned.values()}


class InStep:
    """The steps of one rank's evaluations where ``width`` groups share a sequence. All ranks of the
    sequence take the same, in one order.

    ``ask``: tells the others whether this rank has failed and which steps it knows; returns whether
    any has failed, and which steps all know. All must call it. It decides at once. ``decide``: as
    ``StopFlag`` has it.
    """

    def __init__(self, ask: Callable[[bool, int], tuple[bool, int]], decide: Callable[[torch.Tensor], None], width: int = 1):
        self._ask = ask
        self._decide = decide
        self._width = width
        self._movers: dict[str, Mover] = {}
        self._known, self._kind, self._lasts = KnownSteps(), (), True
        self._relied = 0  # which known steps are taken, 0 while they are learned
        self._steps: list[Step] = []  # all of them, or as far as one has come
        self._at = 0
        self._flag = torch.zeros(1)  # that came last
        self.has_asked = self._is_over = True  # whether nothing is left to ask before the first message
        self._is_broken = False
        self.confirmed = 0  # the steps that all ranks know and have memory for; 0 where there are none

    @property
    def is_even(self) -> bool:
        """Whether this rank has left out no message that others wait for."""
        return self._is_over and not self._is_broken

    def join(self, axis: str, mover: Mover) -> None:
        """Have the messages of an axis be steps."""
        mover.axis, mover.in_step, self._movers[axis] = axis, self, mover

    def begin(self, known: KnownSteps, expected: Expected) -> None:
        """Begin an evaluation of the model that ``known`` belongs to. Raises RuntimeError where
        this rank does not know what all have confirmed.
        """
        self._known, self._kind, self._lasts = known, (self._width, expected.kind), expected.lasts
        self._relied = self.confirmed = 0
        self._rely_on(expected.confirmed)
        self._at, self.has_asked = 0, bool(expected.confirmed)
        self._is_over = self._is_broken = bool(expected.confirmed) and not self._steps
        if self._is_broken:
            raise RuntimeError(f"the steps that were learned in evaluation {expected.confirmed} are not known here")

    def _rely_on(self, number: int) -> None:
        self._relied, self._steps = number, list(self._known.steps_of(number))

    def agree(self) -> None:
        """Find out whether all ranks know the steps to come, unless the request says so. Call it
        before the evaluation's first message, where no result of an earlier one is in use. Raises
        Stopped on all ranks where one has failed.
        """
        if self.has_asked or self._is_over:
            return
        own = self._known.number_of(self._kind)
        for step in set(self._known.steps_of(own)):
            if step.axis in self._movers:
                self._movers[step.axis].make_room(step.what)
        self.has_asked = True
        has_failed, common = self._ask(False, own)
        if has_failed:
            self._is_over = True
            raise Stopped
        self._rely_on(common)

    def expect(self, tokens: Hashable) -> None:
        """Note how many tokens the evaluation has. Where it is another number than before, every
        rank takes all messages for new, also one whose own are as long as before.
        """
        self.enter(Step(TOKENS, tokens))
        self.leave_with(None)

    def decide(self, flag: torch.Tensor) -> None:
        """Raise Stopped, on all ranks alike, if any wishes it: ``flag`` holds all wishes."""
        self.enter(Step(DECISION))
        try:
            self._decide(flag)
        except Stopped:
            self._is_over = True
            raise
        self.leave_with(flag)

    def enter(self, step: Step) -> None:
        """Begin a step that the caller takes; ``leave_with`` the flag that came ends it. Call it
        where nothing can fail any more before the message is on its way. Raises Stopped on all
        ranks where one has failed.
        """
        if not self._is_over:
            self._reach(step)

    def leave_with(self, flag: torch.Tensor | None) -> None:
        self._at += 1
        self._flag = self._flag if flag is None else flag

    def _reach(self, step: Step) -> None:
        if self._at < len(self._steps) and self._steps[self._at] == step:
            return
        if self._relied:
            self._known.change(self._kind)
            self._relied = 0
        del self._steps[self._at :]
        if step.axis not in SILENT and self._ask(False, 0)[0]:
            self._is_over = True
            raise Stopped
        self._steps.append(step)

    def end(self, number: int) -> None:
        """End an evaluation whose messages have all gone through. ``number``: as the method has it.
        Raises Stopped as ``enter``.
        """
        if self._is_over:
            return
        self._reach(Step(END))
        self._is_over = True
        if not self._relied and self._lasts:
            self._known.learn(self._kind, number, self._steps)
        self.confirmed = self._relied or (self._known.number_of(self._kind) if self._lasts else 0)
        self._steps = []

    def fail(self) -> None:
        """Go through what is left of the evaluation, for this rank has failed: until all ranks
        leave it, or its end.
        """
        if self._is_over:
            return
        self._is_over, self._is_broken = True, True
        try:
            if self._relied:
                self._go_through(self._steps[self._at :])
            else:
                self.has_asked = True
                self._ask(True, 0)
        except Stopped:
            pass
        except Exception:  # noqa: BLE001 the failure that came first is told
            return
        self._is_broken = False

    def _go_through(self, steps: list[Step]) -> None:
        came = self._flag
        wish = torch.ones_like(came)
        for step in steps:
            if step.axis == DECISION:
                self._decide(came)
            elif step.axis in self._movers:
                flag = self._movers[step.axis].go_through(step.what, wish)
                came = came if flag is None else flag
