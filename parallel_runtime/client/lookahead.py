"""Answer a loop of ComfyUI's that asks for one result after the other, although none needs another,
several at once. The loop runs twice: it asks for all, then it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Lookahead(Generic[Asked, Answer]):
    """``together`` answers as many as are to be computed side by side, ``at_once``; so many answers
    are kept, and no more. ``ask`` while the loop runs first, ``answer`` when it runs again.
    """

    def __init__(self, together: Callable[[Sequence[Asked]], Sequence[Answer]], at_once: int):
        self._together = together
        self._at_once = at_once
        self._asked: list[Asked] = []
        self._answers: list[Answer] = []

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)

    def answer(self) -> Answer:
        """Returns the answer to what was asked first of all that has none yet."""
        if not self._answers:
            now, self._asked = self._asked[: self._at_once], self._asked[self._at_once :]
            self._answers = [*self._together(now)][::-1]
        return self._answers.pop()
