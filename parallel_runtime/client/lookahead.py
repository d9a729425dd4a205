"""Answer a loop of ComfyUI's that asks for one result after the other, although none needs another,
several at once. The loop runs twice: it asks for all, then it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..errors import Refused

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Lookahead(Generic[Asked, Answer]):
    """``together`` answers as many as are to be computed side by side, ``at_once``; so many answers
    are kept, and no more. ``ask`` while the loop runs first, ``answer`` when it runs again.
    ``otherwise``: the sentence for a loop that wants more then.
    """

    def __init__(self, together: Callable[[Sequence[Asked]], Sequence[Answer]], at_once: int, otherwise: str):
        self._together = together
        self._otherwise = otherwise
        self._at_once = at_once
        self._asked: list[Asked] = []
        self._answers: list[Answer] = []

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)

    def answer(self) -> Answer:
        """Returns the answer to the earliest request that has none yet. Raises Refused if all have
        one.
        """
        if not self._answers and not self._asked:
            raise Refused(self._otherwise)
        if not self._answers:
            now, self._asked = self._asked[: self._at_once], self._asked[self._at_once :]
            self._answers = [*self._together(now)][::-1]
        return self._answers.pop()
