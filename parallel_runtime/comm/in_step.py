"""Keep the ranks of a sequence in step where one of them fails.

A rank that fails goes through the messages that are left of the evaluation, with its wish to stop
and nothing else in them, until all ranks leave together. It has to know them, from an earlier
evaluation of the same kind. Ranks rely on what they know only where all of them know the same: the
request says so, or all ask each other once, before the first message. Else they learn the steps,
and ask each other before every message whether one has failed, and whether all are about to take
the same step of the same tokens and shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ..errors import ModelError

KEPT_KINDS = 32  # of evaluations, of one model, from run to run
DECISION, TOKENS, END = "decision", "tokens", "end"
SILENT = (DECISION, TOKENS)  # no rank waits for another
WISH = 1.0  # to stop
OTHERWISE = 2.0  # of a rank that has other tokens than all have confirmed: all compare theirs
Flag = float | torch.Tensor  # a wish, or the largest of several; 0: none. A tensor has no dimension
COUNTED: tuple[str, ...] = ("ulysses", "ring", "gather", "weights", "pipefusion")  # axes of messages


class Stopped(BaseException):
    """All ranks leave the forward here. Not an Exception: host code catches those around attention.
    ``wish``: the largest of all ranks.
    """

    def __init__(self, wish: float = WISH):
        super().__init__()
        self.wish = wish


class Unlike(BaseException):
    """All ranks leave the forward here, and it raises ``error`` in place of this: they were about
    to take unlike steps. Not an Exception, as Stopped is none.
    """

    def __init__(self, error: ModelError):
        super().__init__()
        self.error = error


class Step(NamedTuple):
    """One step that all ranks of a sequence take together: a message along ``axis``, a decision on
    the stop flags that messages brought (``DECISION``), or the number of tokens (``TOKENS``). It
    holds names, counts and indices only, because a step outlives the tensors that it moves.
    """

    axis: str
    what: Hashable = None


class Told(NamedTuple):
    """What all ranks have told each other: whether one has failed, and the least and the largest of
    their numbers. A rank that has none tells 0.
    """

    has_failed: bool
    least: int
    most: int

    @property
    def common(self) -> int:
        """The number that all have told, 0 if there is none."""
        return self.most if self.least == self.most else 0

    @property
    def are_unlike(self) -> bool:
        return 0 < self.least < self.most


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


class Traffic:
    """Which messages there were since the evaluation, or its patch, began, and what they cost: sent
    bytes, and seconds of waiting, by axis. Both are 0 for axes that nothing went along.

    ``at``: the number of messages that this rank took part in, and a crc of their axes in order.
    Ranks that have the same are at the same place. None if one is unfinished. ``is_complete``:
    whether no message is left, because the forward is over.
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.waited_s: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        self.at: tuple[int, int] | None = (0, 0)
        self.is_complete = False

    def clear(self) -> None:
        for axis in COUNTED:
            self.sent_bytes[axis], self.waited_s[axis] = 0, 0.0
        self.at, self.is_complete = (0, 0), False

    @contextmanager
    def message(self, axis: str) -> Iterator[None]:
        """Take part in one message inside. If that is left by an error, or given up, the message
        stays unfinished: another rank may wait for its rest, or a later one find it.
        """
        before, self.at = self.at, None
        yield
        self.at = None if before is None else (before[0] + 1, crc32(axis.encode(), before[1]))


class Mover:
    """What moves the messages of one ``axis`` among ``size`` ranks. ``in_step``: where its messages
    are steps; None where they are not. ``traffic``: where they are counted.

    ``via_cpu``: messages go through CPU memory, whatever the ranks compute on.
    """

    def __init__(self, axis: str, size: int, *, via_cpu: bool):
        self.axis = axis
        self.size = size
        self.via_cpu = via_cpu
        self.in_step: InStep | None = None
        self.traffic = Traffic()
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._laid: dict[Hashable, Any] = {}  # message -> its places, views of the buffers

    def make_room(self, what: Hashable) -> None:
        """Have the memory that the message takes."""
        raise NotImplementedError

    def go_through(self, what: Hashable, wish: Flag) -> Flag | None:
        """Take part in the message with whatever lies in its memory; return the flag that came, if
        one did.
        """
        raise NotImplementedError

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self._buffers.values())

    def free_buffers(self) -> None:
        self._buffers.clear()
        self._laid.clear()

    def _buffer(self, use: Hashable, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the first ``count`` elements of a buffer that is kept for this use."""
        key = (use, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count:
            self._laid.clear()  # else a buffer would live on in views of it
            self._buffers[key] = torch.empty(
                count, dtype=dtype, device=device, pin_memory=self.via_cpu and torch.cuda.is_available()
            )
        return self._buffers[key][:count]

    def _flags(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for every rank's flag, and for the largest. It is there before anything is
        sent: a rank that has no memory fails before others wait for it.
        """
        wishes = torch.empty(self.size, dtype=dtype, device=device)
        return wishes, wishes.new_empty(())


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

    def end_run(self, named: Collection[int] = ()) -> None:
        """Forget what was learned longest ago, where it is much, but for what may be ``named``."""
        self._changing.clear()
        for kind in list(self._learned)[:-KEPT_KINDS]:
            del self._learned[kind]
        stay = {*self._learned.values(), *named}
        self._steps = {number: steps for number, steps in self._steps.items() if number in stay}


@dataclass
class Course:
    """The steps of the evaluation at hand, ``at`` of which are done. ``relied``: which known ones
    they are, 0 while they are learned. ``lasts``: as ``Expected`` has it. ``tokens``: as ``expect``
    was told, ``count`` in all.
    """

    known: KnownSteps
    kind: Hashable
    lasts: bool = True
    relied: int = 0
    steps: list[Step] = field(default_factory=list)
    at: int = 0
    tokens: Hashable = ()
    count: int = 0


class InStep:
    """The steps of one rank's evaluations where ``width`` groups share a sequence. All ranks of the
    sequence take the same, in one order, of the same ``shares``.

    ``ask``: tells the others whether this rank has failed, and a number; returns what all have
    told. All must call it. It decides at once. ``decide``: as ``StopFlag`` has it.
    """

    def __init__(
        self,
        ask: Callable[[bool, int], Told],
        decide: Callable[[Flag], None],
        width: int = 1,
        shares: Hashable = (),
    ):
        self._ask = ask
        self._decide = decide
        self._sharing = width, shares
        self._movers: dict[str, Mover] = {}
        self._course = Course(KnownSteps(), ())
        self.flag: Flag = 0.0  # that came last
        self._is_over = True
        self._is_broken = False
        self.has_asked = True  # whether nothing is to be asked any more before the first message
        self.confirmed = 0  # the steps that all ranks know and have memory for; 0 where there are none

    @property
    def is_even(self) -> bool:
        """Whether this rank has left out no message that others wait for."""
        return self._is_over and not self._is_broken

    def join(self, mover: Mover) -> None:
        """Have the messages of ``mover`` be steps."""
        self._movers[mover.axis] = mover
        mover.in_step = self

    def begin(self, known: KnownSteps, expected: Expected) -> None:
        """Begin an evaluation of the model that ``known`` belongs to. Raises RuntimeError where
        this rank does not know what all have confirmed.
        """
        steps = list(known.steps_of(expected.confirmed))
        self._course = Course(
            known, (self._sharing, expected.kind), expected.lasts, expected.confirmed, steps
        )
        self.confirmed, self.has_asked = 0, bool(expected.confirmed)
        self.flag = 0.0
        self._is_over = self._is_broken = bool(expected.confirmed) and not steps
        if self._is_broken:
            raise RuntimeError(
                f"the steps that were learned in evaluation {expected.confirmed} are not known here"
            )

    def agree(self) -> None:
        """Find out whether all ranks know the steps to come, unless the request says so. Call it
        before the evaluation's first message, where no result of an earlier one is in use. Raises
        Stopped on all ranks where one has failed.
        """
        if self.has_asked or self._is_over:
            return
        course = self._course
        own = course.known.number_of(course.kind)
        for step in set(course.known.steps_of(own)):
            if step.axis in self._movers:
                self._movers[step.axis].make_room(step.what)
        self.has_asked = True
        told = self._ask_all(own)
        course.relied, course.steps = told.common, list(course.known.steps_of(told.common))

    def _ask_all(self, number: int) -> Told:
        """Ask, as a rank that has not failed. Raises Stopped on all ranks if one has."""
        told = self._ask(False, number)
        if told.has_failed:
            self._is_over = True
            raise Stopped
        return told

    def expect(self, tokens: Hashable, count: int) -> None:
        """Note which tokens the evaluation has, ``count`` of them. If the token counts differ from
        the recorded ones, all ranks discard the recorded schedule, even a rank whose own message
        sizes did not change: either all ranks ask, or none.
        """
        self._course.tokens, self._course.count = tokens, count
        self.enter(TOKENS, tokens)
        self.leave_with(None)

    def decide(self, flag: Flag) -> None:
        """Raise Stopped, on all ranks alike, if any wishes it: ``flag`` holds all wishes."""
        self.enter(DECISION)
        try:
            self._decide(flag)
        except Stopped as stopped:
            if self._has_others(stopped.wish):
                self._compare([])
            self._is_over = True
            raise
        self.leave_with(flag)

    def enter(self, axis: str, what: Hashable = None) -> None:
        """Begin a step that the caller takes; ``leave_with`` the flag that came ends it. Call it
        where nothing can fail any more before the message is on its way. Raises Stopped on all
        ranks where one has failed, Unlike on all if they are about to take unlike steps.

        A step that is not the one known to come is learned, and what was known behind it is void.
        """
        if self._is_over:
            return
        step, course = Step(axis, what), self._course
        if course.at < len(course.steps) and course.steps[course.at] == step:
            return
        if course.relied:
            course.known.change(course.kind)
            course.relied = 0
            # Ranks whose tokens are as all have confirmed hear of others in the messages that come
            if axis == TOKENS:
                self._is_over = self._is_broken = True  # if this fails, messages are left out
                leaves = self._go_through(course.steps[course.at :], OTHERWISE)
                self._is_over = self._is_broken = False
                if leaves:
                    self._compare([])
        del course.steps[course.at :]
        if axis not in SILENT:
            self._compare([*(step.axis for step in course.steps), axis])
        course.steps.append(step)

    def _compare(self, order: Sequence[str]) -> None:
        """Ask whether one has failed, and whether all ranks have the same tokens, shares and
        ``order`` of steps: a message of another length is garbage to its receiver, or its end.
        """
        course = self._course
        if not self._ask_all(digest((course.tokens, self._sharing, order))).are_unlike:
            return
        count, tokens = self._ask_all(1 + course.count), self._ask_all(digest(course.tokens))
        shares = self._ask_all(digest(self._sharing))
        self._is_over = True
        what = "their messages' order"
        if tokens.are_unlike:
            what = f"the tokens that they compute ({count.least - 1} on one, {count.most - 1} on another)"
        elif shares.are_unlike:
            what = "the shares that each takes"
        raise Unlike(
            ModelError(
                f"The workers of one image differ in {what}: queue again, and if they differ again, bypass"
                " Parallelize for this MODEL and report it."
            )
        )

    def leave_with(self, flag: Flag | None) -> None:
        self._course.at += 1
        self.flag = self.flag if flag is None else flag

    def end(self, number: int) -> None:
        """End an evaluation whose messages have all gone through. ``number``: as the method has it.
        Raises Stopped as ``enter``.
        """
        if self._is_over:
            return
        self.enter(END)
        self._is_over = True
        course = self._course
        if course.relied or not course.lasts:
            self.confirmed = course.relied
        else:
            course.known.learn(course.kind, number, course.steps)
            self.confirmed = course.known.number_of(course.kind)
        course.steps, self.flag = [], 0.0

    def fail(self) -> None:
        """Go through what is left of the evaluation, for this rank has failed: until all ranks
        leave it, or its end.
        """
        if self._is_over:
            return
        self._is_over = self._is_broken = True
        course = self._course
        try:
            if not course.relied or self._has_others(self._go_through(course.steps[course.at :], WISH)):
                self.has_asked = True
                self._ask(True, 0)
        except Exception:  # noqa: BLE001 the failure that came first is told
            return
        self._is_broken = False

    def _has_others(self, wish: float) -> bool:
        """Whether ranks leave because one has other tokens: none relies on such steps any more."""
        if wish != OTHERWISE:
            return False
        self._course.known.change(self._course.kind)
        return True

    def _go_through(self, steps: list[Step], wish: float) -> float:
        """Take part in ``steps`` with nothing but a wish, until all ranks leave; return for which,
        0 if they do not.
        """
        came = self.flag
        try:
            for step in steps:
                if step.axis == DECISION:
                    self._decide(came)
                elif step.axis in self._movers:
                    # The ranks along this axis may not have heard of what came along another. It is
                    # changed in place: there may be no memory left
                    largest = came.clamp_(min=wish) if isinstance(came, torch.Tensor) else max(came, wish)
                    flag = self._movers[step.axis].go_through(step.what, largest)
                    came = came if flag is None else flag
        except Stopped as stopped:
            return stopped.wish
        return 0.0


def digest(content: object) -> int:
    """Return a number above 0 that ranks tell each other in place of the content."""
    return 1 + crc32(repr(content).encode())
