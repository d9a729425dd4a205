"""Keep the ranks of a sequence in step where one of them fails.

A rank that fails goes through the messages that are left of the evaluation, with its wish to stop
and nothing else in them, until all ranks leave together. It has to know them, from an earlier
evaluation of the same kind. Ranks rely on what they know only where all of them know the same: the
request says so, or all ask each other once, before the first message. Else they learn the steps,
and ask each other before every message whether one has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
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
    """One step that all ranks of a sequence take together: a message along ``axis``, a decision on
    the stop flags that messages brought (``DECISION``), or the number of tokens (``TOKENS``). It
    holds names, counts and indices only, because a step outlives the tensors that it moves.
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
    """What moves the messages of one axis, and notes them in ``steps`` if that is there."""

    steps: AxisSteps | None

    def make_room(self, what: Hashable) -> None:
        """Have the memory that the message takes."""

    def go_through(self, what: Hashable, flag: torch.Tensor) -> torch.Tensor | None:
        """Take part in the message with whatever lies in its memory; return the flag that came, if
        one did.
        """


class AxisSteps(NamedTuple):
    """Where the messages of one axis are noted, as ``InStep`` has it."""

    in_step: InStep
    axis: str

    def enter(self, what: Hashable) -> None:
        self.in_step.enter(Step(self.axis, what))

    def leave_with(self, flag: torch.Tensor | None) -> None:
        self.in_step.leave_with(flag)


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


@dataclass
class Course:
    """The steps of the evaluation at hand, and how far one has come. ``relied``: which known ones
    they are, 0 while they are learned. ``has_asked``: whether nothing is to be asked any more
    before the first message.
    """

    known: KnownSteps
    kind: Hashable
    expected: Expected
    steps: list[Step] = field(default_factory=list)
    at: int = 0
    relied: int = 0
    has_asked: bool = True

    def rely_on(self, number: int) -> None:
        self.relied, self.steps = number, list(self.known.steps_of(number))

    def is_next(self, step: Step) -> bool:
        """Return whether it is the step that is known to come. If it is not, it is learned, and
        what was known behind it is void.
        """
        if self.at < len(self.steps) and self.steps[self.at] == step:
            return True
        if self.relied:
            self.known.change(self.kind)
            self.relied = 0
        del self.steps[self.at :]
        return False

    def confirmed(self, number: int) -> int:
        """Note that the evaluation took these steps; return which they are, 0 where the next may
        take others.
        """
        if self.relied or not self.expected.lasts:
            return self.relied
        self.known.learn(self.kind, number, self.steps)
        return self.known.number_of(self.kind)


class InStep:
    """The steps of one rank's evaluations where ``width`` groups share a sequence. All ranks of the
    sequence take the same, in one order.

    ``ask``: tells the others whether this rank has failed and which steps it knows; returns whether
    any has failed, and which steps all know. All must call it. It decides at once. ``decide``: as
    ``StopFlag`` has it.
    """

    def __init__(
        self,
        ask: Callable[[bool, int], tuple[bool, int]],
        decide: Callable[[torch.Tensor], None],
        width: int = 1,
    ):
        self._ask = ask
        self._decide = decide
        self._width = width
        self._movers: dict[str, Mover] = {}
        self._course = Course(KnownSteps(), (), Expected())
        self._flag = torch.zeros(1)  # that came last
        self._is_over = True
        self._is_broken = False
        self.confirmed = 0  # the steps that all ranks know and have memory for; 0 where there are none

    @property
    def is_even(self) -> bool:
        """Whether this rank has left out no message that others wait for."""
        return self._is_over and not self._is_broken

    @property
    def has_asked(self) -> bool:
        """Whether nothing is to be asked any more before the first message."""
        return self._course.has_asked

    def join(self, axis: str, mover: Mover) -> None:
        """Have the messages of an axis be steps."""
        self._movers[axis] = mover
        self.note(axis)

    def note(self, axis: str) -> None:
        """Have the messages of an axis be noted here, from the next evaluation on."""
        if axis in self._movers:
            self._movers[axis].steps = AxisSteps(self, axis)

    def begin(self, known: KnownSteps, expected: Expected) -> None:
        """Begin an evaluation of the model that ``known`` belongs to. Raises RuntimeError where
        this rank does not know what all have confirmed.
        """
        self._course = Course(
            known, (self._width, expected.kind), expected, has_asked=bool(expected.confirmed)
        )
        self._course.rely_on(expected.confirmed)
        self.confirmed = 0
        self._is_over = self._is_broken = bool(expected.confirmed) and not self._course.steps
        if self._is_broken:
            raise RuntimeError(
                f"the steps that were learned in evaluation {expected.confirmed} are not known here"
            )

    def agree(self) -> None:
        """Find out whether all ranks know the steps to come, unless the request says so. Call it
        before the evaluation's first message, where no result of an earlier one is in use. Raises
        Stopped on all ranks where one has failed.
        """
        course = self._course
        if course.has_asked or self._is_over:
            return
        own = course.known.number_of(course.kind)
        for step in set(course.known.steps_of(own)):
            if step.axis in self._movers:
                self._movers[step.axis].make_room(step.what)
        course.has_asked = True
        has_failed, common = self._ask(False, own)
        if has_failed:
            self._is_over = True
            raise Stopped
        course.rely_on(common)

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
        if self._is_over or self._course.is_next(step):
            return
        if step.axis not in SILENT and self._ask(False, 0)[0]:
            self._is_over = True
            raise Stopped
        self._course.steps.append(step)

    def leave_with(self, flag: torch.Tensor | None) -> None:
        self._course.at += 1
        self._flag = self._flag if flag is None else flag

    def end(self, number: int) -> None:
        """End an evaluation whose messages have all gone through. ``number``: as the method has it.
        Raises Stopped as ``enter``.
        """
        if self._is_over:
            return
        self.enter(Step(END))
        self._is_over = True
        self.confirmed = self._course.confirmed(number)
        self._course.steps = []

    def fail(self) -> None:
        """Go through what is left of the evaluation, for this rank has failed: until all ranks
        leave it, or its end.
        """
        if self._is_over:
            return
        self._is_over, self._is_broken, course = True, True, self._course
        try:
            if course.relied:
                self._go_through(course.steps[course.at :])
            else:
                course.has_asked = True
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
