"""The wait for a sampling's first step, which users are shown."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Wait:
    """A wait; this class shows it to nobody. ``begin`` may be called again while it lasts, and
    ``end`` when it is over.
    """

    def begin(self) -> None: ...

    def came(self) -> None: ...

    def end(self) -> None: ...

    def is_seen(self) -> bool:
        """Returns whether a page has queued the prompt. Scripts read every frame that they are
        sent, so they are shown nothing.
        """
        return False


def waited_for(prepare: Callable) -> Callable:
    """Decorates a function that prepares a MODEL's sampling: the wait for its first step begins,
    and ends if the function raises. Otherwise the run's end ends it.
    """

    @functools.wraps(prepare)
    def wrapped(executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        wait: Wait = model.remote.pool.wait
        wait.begin()
        try:
            return prepare(executor, model, *args, **kwargs)
        except BaseException:
            wait.end()
            raise

    return wrapped
