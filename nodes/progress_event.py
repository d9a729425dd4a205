"""The event that tells the panel how a user's wait goes on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Waited:
    """One event, ``pipemesh.progress``. ``node`` and ``prompt`` are ComfyUI's ids. ``done`` of
    ``total`` counts bytes, weights or ranks: 3 of 4 ranks have started. It is 0 of 0 if the total
    is not known. ``seconds`` have passed since the sampling began.
    """

    node: str
    prompt: str
    text: str
    done: int
    total: int
    seconds: float
