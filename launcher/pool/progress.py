"""Say in one line why a user waits for ranks: they start, load a model, patch its
weights or compile its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

STARTING, LOADING, PATCHING = "starting workers", "loading the model", "patching weights"
COMPILING = "compiling the model's blocks"
LEAVING = "waiting for what was stopped"
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


def act_of(phases: Sequence[str]) -> str:
    """Returns what ranks in these phases are waited for; empty where they only compute."""
    return next((ACTS[phase] for phase in phases if phase in ACTS), "")


class Progress:
    """Tells each line once. ``ranks``: all of the pool; ``tell`` takes a line of text."""

    def __init__(self, ranks: int, tell: Callable[[str], None]):
        self._ranks = ranks
        self._tell = tell
        self._act = ""
        self._last = ""

    def begin(self) -> None:
        """Forgets what was told of earlier requests."""
        self._act = self._last = ""

    def clear(self) -> None:
        """Takes the line away: what was waited for failed, or was cancelled."""
        if self._act:
            self._say("")
            self._act = ""

    def look(self, phases: Sequence[str], is_wanted: bool = True) -> None:
        """Says what is waited for. ``phases`` of the ranks that owe an answer; ``is_wanted``: it
        was not cancelled.
        """
        act = act_of(phases) or ("" if is_wanted else LEAVING)
        if act:
            self._act = act
            self._say(f"PipeMesh: {act}, {self._ranks - len(phases)} of {self._ranks} ready")

    def end(self) -> None:
        """Says that what was waited for is done, if a line was told of it."""
        if self._act:
            self._say(f"PipeMesh: {DONE[self._act]}")
            self._act = ""

    def _say(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._tell(text)
