"""Compares the full content of the UI's weights with the ranks' weights, while the ranks load or
compute.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future

from ..errors import Refused
from .comparison import Weights


class BackgroundCheck:
    """Compares all weights in memory, once, with their content when ranks got them, in a thread of
    its own: 0.1 s a GiB of one core. Weights whose pages show every write are left out.

    ``title`` names the model to users. ``error_before``: the error that was being handled when the
    run began.
    """

    def __init__(self, weights: Weights, title: str):
        self._weights = weights
        self._title = title
        self.error_before = sys.exc_info()[1]
        self._is_ended = threading.Event()
        self._changed: Future[list[str]] = Future()  # names of weights that were written to
        self._thread = threading.Thread(target=self._compare, name="pipemesh-weights", daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        try:
            changed = list(self._weights.changed_since(self._is_ended.is_set))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._changed.set_exception(error)
        else:
            self._changed.set_result(changed)

    def require_unchanged(self, wait_s: float = 0.0) -> bool:
        """Returns whether all weights have been compared within so many seconds. Raises Refused for
        weights that were written to: the next comparison sends them to the ranks.
        """
        self._thread.join(wait_s)
        if not self._changed.done():
            return False
        if names := self._changed.result():
            self._weights.forget(names)
            raise Refused(
                f"A node has written to the weight {names[0]} of {self._title} in a way that torch does not"
                " count (numpy, tensor.data or inference mode), and the ranks still have the old one: run"
                " again, and they get the new one."
            )
        return True

    def end(self) -> None:
        """Ends the thread, within milliseconds."""
        self._is_ended.set()
        self._thread.join()
