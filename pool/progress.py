"""Say in one line why a user waits for ranks: they start, load a model, patch its
weights or compile its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..parallel_runtime.wire.arena import Board

STARTING, LOADING, PATCHING = "starting workers", "loading the model", "patching weights"
COMPILING = "compiling the model's blocks"
LEAVING = "waiting for the stopped run to end"
ACTS = {
    **dict.fromkeys(("starting", "importing", "joining"), STARTING),
    "loading": LOADING,
    "patching": PATCHING,
    "compiling": COMPILING,
}
DONE = {
    STARTING: "workers are ready",
    LOADING: "the model is loaded",
    PATCHING: "weights are patched",
    COMPILING: "blocks are compiled",
    LEAVING: "workers are ready",
}
GIB = 1 << 30


@dataclass(frozen=True)
class Told:
    """A line that tells a user why they wait. ``done`` of ``total`` counts bytes of a load, weights
    of a patching, or ranks that are ready: 1 of 4. It is 0 of 0 if the progress is not known.
    ``text`` is empty if the awaited work failed or was cancelled. With ``stays`` the line holds for
    as long as the sampling goes on.
    """

    text: str
    done: int = 0
    total: int = 0
    amount: str = ""  # in words, where more is known than how many ranks are ready
    stays: bool = False

    @property
    def line(self) -> str:
        return f"{self.text} ({self.amount})" if self.amount else self.text


class Progress:
    """Tells users why they wait, whenever that changes, by calling ``tell``. ``board`` shows how
    far each of ``ranks`` is.
    """

    def __init__(self, ranks: int, tell: Callable[[Told], None], board: Board):
        self._ranks = ranks
        self._tell = tell
        self._board = board
        self._act = ""
        self._last = Told("")

    def clear(self) -> None:
        """Takes the line away, because the awaited work failed or was cancelled."""
        if self._act:
            self._say(Told(""))
            self._act = ""

    def look(self, phases: Sequence[str], title: str = "", is_wanted: bool = True) -> None:
        """Says why users wait. ``phases`` are those of the ranks that owe an answer. ``title``
        names the requested model. ``is_wanted`` is false after a cancel.
        """
        act = next((ACTS[phase] for phase in phases if phase in ACTS), "" if is_wanted else LEAVING)
        if not act:
            return
        self._act = act
        ready = self._ranks - len(phases)
        named = f"loading {title}" if act == LOADING and title else act
        text = f"PipeMesh: {named}, {ready} of {self._ranks} ready"
        done = total = 0
        if act in (LOADING, PATCHING):
            done, total = map(sum, zip(*map(self._board.counted, range(self._ranks)), strict=True))
        if not total:
            self._say(Told(text, ready, self._ranks))
            return
        share = f"{100 * done // total} %"
        of_bytes = f" of {total / GIB:.1f} GiB" if act == LOADING and total >= GIB // 10 else ""
        self._say(Told(text, done, total, share + of_bytes))

    def end(self) -> None:
        """Says that the awaited work is done, if a line told of it."""
        if self._act:
            self._say(Told(f"PipeMesh: {DONE[self._act]}"))
            self._act = ""

    def _say(self, told: Told) -> None:
        if told != self._last:
            self._last = told
            self._tell(told)
