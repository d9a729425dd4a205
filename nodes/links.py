"""Sockets that take a link and nothing else: ComfyUI does not look at what a prompt has there."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

# Else of the node that makes it
FROM = {"pool": "PipeMesh Pool", "model": "a loader or PipeMesh Parallelize"}


def require_links(**given: Any) -> bool | str:
    """Check sockets when a prompt is queued: True, or the sentence that names the one with a value
    in place of a link. A link is None here, as is a socket that is left open.
    """
    for name, value in given.items():
        if value is not None:
            return (
                f"{name} is {short(value)}, and takes a link alone: connect {name} of"
                f" {FROM.get(name, 'the node that makes it')}."
            )
    return True
