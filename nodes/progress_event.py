"""What the panel is told of a user's wait."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Waited:
    """One event, ``pipemesh.progress``. ``node`` and ``prompt``: the ids of ComfyUI's. ``done`` of
    ``total``: bytes, weights or ranks; 0 of 0 where that is not known. ``seconds`` since the
    sampling began.
    """

    node: str
    prompt: str
    text: str
    done: int
    total: int
    seconds: float
