"""The nodes of ComfyUI's page as a screen: text and bar by ComfyUI's own progress, and an event."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from comfy_execution.progress import get_progress_state
from server import PromptServer

from .progress_event import Waited

# What ComfyUI's page says of itself that can show text on a node, first of all over its websocket
SHOWS_TEXT = "supports_progress_text_metadata"


class NodeScreen:
    """Shows the progress of a wait on the node that samples, on the page that queued the prompt.
    May be called from any thread.

    The bar goes through ComfyUI's registry alone, so that its event ``progress`` tells the same of
    steps as without the pack.
    """

    def __init__(self) -> None:
        self._left = (0.0, 1.0)  # how the node's bar was before, or was drawn here last

    def is_seen(self) -> bool:
        return page_now() is not None

    def note_bar(self, node: str) -> None:
        """Notes how far the node's own bar is now."""
        self._left = bar_of(node)

    def is_sampling(self, node: str) -> bool:
        """Returns whether the node itself has moved its bar since, as samplers do at each step."""
        return bar_of(node) != self._left

    def show(self, waited: Waited) -> None:
        if not self.is_seen():
            return
        done, total = (waited.done, waited.total) if waited.total else (0, 1)
        get_progress_state().update_progress(waited.node, done, total)
        self._left = bar_of(waited.node)
        show_text(waited.text, waited.node)
        send_event("pipemesh.progress", waited)

    def end(self, node: str, text: str) -> None:
        """Leaves a last line on the node."""
        show_text(text, node)


def span_of(prompt: str) -> tuple[float, float] | None:
    """Return when a prompt that has ended began and ended, in seconds, by ComfyUI's history."""
    status = PromptServer.instance.prompt_queue.history.get(prompt, {}).get("status") or {}
    at = {event: told["timestamp"] / 1e3 for event, told in status.get("messages", ())}
    return (at["execution_start"], max(at.values())) if "execution_start" in at else None


def page_now() -> str | None:
    """Return the id of the page that has queued the prompt. None if a script has queued it, which
    may take the frame for a picture, and if nobody listens: ComfyUI would send it to every page.
    """
    server = PromptServer.instance
    flags = server.sockets_metadata.get(server.client_id, {}).get("feature_flags", {})
    return server.client_id if flags.get(SHOWS_TEXT) is True else None


def show_text(text: str, node: str) -> None:
    """Put a line of text on a node of the page that has queued the prompt."""
    if (page := page_now()) is not None:
        PromptServer.instance.send_progress_text(text, node, page)


def send_event(name: str, data: Any) -> None:
    """Send a dataclass to the page that has queued the prompt."""
    if (page := page_now()) is not None:
        PromptServer.instance.send_sync(name, asdict(data), page)


def bar_of(node: str) -> tuple[float, float]:
    state = get_progress_state().nodes.get(node)
    return (state["value"], state["max"]) if state is not None else (0.0, 1.0)
