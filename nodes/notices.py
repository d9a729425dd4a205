"""Notices: what a user should know of a run that is no error, with the node that it is about."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from comfy_execution.utils import get_executing_context

KEPT = 20
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Notice:
    """``at``: seconds since 1970. ``node`` and ``prompt``: the ids of ComfyUI's; empty where
    no node runs.
    """

    at: float
    node: str
    prompt: str
    text: str


class Notices:
    """Keeps the last notices; writes each to the log and hands it to ``show``."""

    def __init__(self, show: Callable[[Notice], None] = lambda notice: None):
        self._show = show
        self._kept: deque[Notice] = deque(maxlen=KEPT)

    def tell(self, text: str) -> None:
        executing = get_executing_context()
        node, prompt = (str(executing.node_id), executing.prompt_id) if executing is not None else ("", "")
        notice = Notice(time.time(), node, prompt, text)
        self._kept.append(notice)
        log.warning("[PipeMesh] %s%s", f"Node {node}: " if node else "", text)
        self._show(notice)

    def latest(self) -> tuple[Notice, ...]:
        """Returns the last notices, the newest first. May be asked from any thread."""
        return tuple(reversed(self._kept.copy()))
