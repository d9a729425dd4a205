"""Say in one line why a user waits for ranks: they start, load a model, or patch its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

STARTING, LOADING, PATCHING = "starting workers", "loading the model", "patching weights"
ACTS = {"starting": STARTING, "importing": STARTING, "joining": STARTING, "loading": LOADING, "patching": PATCHING}
DONE = {STARTING: "workers are ready", LOADING: "the model is loaded", PATCHING: "weights are patched"}


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
        """Forgets what was waited for: it failed, or was cancelled."""
        self._act = self._last = ""

    def look(self, phases: Sequence[str]) -> None:
        """``phases`` of the ranks that owe an answer."""
        act = act_of(phases)
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
