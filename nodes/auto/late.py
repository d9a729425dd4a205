"""Remember what failed in the pool after a first step, so that the next prompt does without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..timing import Key

MOST = 200  # kinds of samplings that are remembered


@dataclass
class LateFailures:
    """Remembers a failure by the kind of sampling, for one prompt: the first that samples such a
    kind again. No failure is kept for longer, as a refusal does not say whether it would come
    again; and none for less, as a node may sample many times in one prompt.
    """

    # Why, and the prompt that does without the pool
    _kept: dict[Key, tuple[str, str]] = field(default_factory=dict)

    def note(self, kind: Key, why: str) -> None:
        self._kept.pop(kind, None)
        self._kept[kind] = why, ""
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]

    def why(self, kind: Key, prompt: str) -> str:
        """Says why this prompt samples such a kind on one GPU; empty where it need not. Outside a
        prompt, one sampling does.
        """
        why, first = self._kept.pop(kind, ("", ""))
        if first not in ("", prompt):
            return ""
        if why and prompt:
            self._kept[kind] = why, prompt
        return why
