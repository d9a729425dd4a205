"""Which ComfyUI a command runs on. Apart from what finds and installs one, because a command that
runs in ComfyUI's python, the leader of a machine among them, needs no more. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ComfyInstall:
    """A ComfyUI, and the Python that runs it. `base` is the cache folder that holds it; empty for
    the user's own.
    """

    python: str
    comfyui: str
    version: str
    base: str

    def to_json(self) -> str:
        """Returns the value of PIPEMESH_HOST, by which one process tells another."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ComfyInstall:
        return cls(**json.loads(text))
