"""The nodes of ComfyUI's page as a screen: text and bar by ComfyUI's own progress, and an event."""

from __future__ import annotations

from dataclasses import asdict

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from .waiting import Waited


class NodeScreen:
    """Shows what is waited for on the node that samples, in the browser that has queued it.

    The bar goes through ComfyUI's registry alone: what its event ``progress`` says of steps stays
    as without the pack.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[float, float]] = set()  # how the node's bar was before, and as drawn here

    def node_now(self) -> tuple[str, str] | None:
        executing = get_executing_context()
        return (str(executing.node_id), executing.prompt_id) if executing is not None else None

    def begin(self, node: str) -> None:
        self._seen = {bar_of(node)}

    def is_sampling(self, node: str) -> bool:
        return bar_of(node) not in self._seen

    def show(self, waited: Waited) -> None:
        done, total = (waited.done, waited.total) if waited.total else (0, 1)
        self._seen.add((done, total))
        get_progress_state().update_progress(waited.node, done, total)
        server = PromptServer.instance
        server.send_progress_text(waited.text, waited.node)
        server.send_sync("pipemesh.progress", asdict(waited), server.client_id)

    def end(self, node: str, text: str) -> None:
        PromptServer.instance.send_progress_text(text, node)


def bar_of(node: str) -> tuple[float, float]:
    state = get_progress_state().nodes.get(node)
    return (state["value"], state["max"]) if state is not None else (0.0, 1.0)
