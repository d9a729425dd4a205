"""Notices: facts about a run that a user should know and that are no errors, each with its node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from comfy_execution.utils import get_executing_context

KEPT = 20
OF_A_VAE = "This VAE is decoded and encoded by ComfyUI on one device"
OF_AN_UPSCALER = "This upscale model is computed by ComfyUI on one device"
log = logging.getLogger("pipemesh")


@dataclass(frozen=True)
class Notice:
    """``at``: seconds since 1970, of the last time. ``node`` and ``prompt``: the ids of ComfyUI's;
    empty if no node runs. ``detail``: more lines, such as the last ones of a worker's log.
    ``count``: how often it was told in this prompt. ``one_gpu``: the node computes on one GPU.
    ``stays``: it holds for later samplings too.
    """

    at: float
    node: str
    prompt: str
    text: str
    detail: str = ""
    count: int = 1
    one_gpu: bool = True
    stays: bool = False

    @property
    def subject(self) -> tuple[str, str, str]:
        return self.prompt, self.node, self.text


def executed_now() -> tuple[str, str]:
    """Return the ids of the node and the prompt that this thread executes; two empty texts if it
    executes none.
    """
    executing = get_executing_context()
    return (str(executing.node_id), executing.prompt_id) if executing is not None else ("", "")


class Notices:
    """Keeps the last notices; writes each to the log and hands it to ``show``.

    A node that samples many times, as upscalers do for each tile, is told of once: the notice has
    a count.
    """

    def __init__(self, show: Callable[[Notice], None] = lambda notice: None):
        self._show = show
        self._kept: tuple[Notice, ...] = ()  # the newest first; replaced whole, for others read it meanwhile
        self._lock = threading.Lock()  # several threads tell

    def tell(self, text: str, detail: str = "", *, one_gpu: bool = True, stays: bool = False) -> None:
        node, prompt = executed_now()
        notice = Notice(time.time(), node, prompt, text, detail, one_gpu=one_gpu, stays=stays)
        with self._lock:
            before = next((one for one in self._kept if one.subject == notice.subject), None)
            others = tuple(one for one in self._kept if one is not before)
            if before is not None:
                notice = replace(notice, count=before.count + 1)
            self._kept = (notice, *others)[:KEPT]
        if before is None:
            log.warning(
                "[PipeMesh] %s%s%s", f"Node {node}: " if node else "", text, f"\n{detail}" if detail else ""
            )
            self._show(notice)

    def latest(self) -> tuple[Notice, ...]:
        """Returns the last notices, the newest first. May be asked from any thread."""
        return self._kept
