"""ComfyUI's HTTP and websocket interface: queue a graph, follow its events, read its result.

Protocol: comfyui@0.30.0 server.py (routes, `send_image_with_metadata`), main.py (`executing` with
node None comes after /history is written), protocol.py (binary events). Every run has a client id
and a websocket of its own, so runs from several threads do not mix; it is served as a page.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from ...launcher.errors import LaunchError

PREVIEW, PREVIEW_WITH_METADATA = 1, 4  # comfyui: protocol.BinaryEventTypes
# What ComfyUI's page says of itself first
PAGE = {
    "type": "feature_flags",
    "data": {"supports_preview_metadata": True, "supports_progress_text_metadata": True},
}

Graph = Mapping[str, Mapping[str, Any]]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return a node of a graph; an input that is another node's output is [its name, number]."""
    return {"class_type": class_type, "inputs": inputs}


class ServerError(LaunchError):
    """ComfyUI did not start, died, or did not answer in time; the message ends with the last lines
    of its log.
    """


@dataclass(frozen=True)
class Event:
    """One websocket message. Previews have the type "preview", their metadata as `data` and a JPEG
    or PNG as `image`.
    """

    type: str
    data: Mapping[str, Any]
    at_s: float  # time.perf_counter() at its arrival
    image: bytes = b""


@dataclass(frozen=True)
class Tick:
    """A node's progress, at the moment it reached us."""

    node: str
    value: int
    maximum: int
    at_s: float


@dataclass(frozen=True)
class RunError:
    """Why a run gave no result. `kind`: "refused" (by validation), "failed" or "interrupted"; the
    node is "" when it is the whole graph. `exception`: the name of its class, where there was one.
    """

    kind: str
    node: str
    class_type: str
    message: str
    exception: str = ""

    def __str__(self) -> str:
        return (
            f"{self.class_type} (node {self.node}) {self.kind}: {self.message}"
            if self.node
            else f"{self.kind}: {self.message}"
        )


@dataclass(frozen=True)
class RunResult:
    prompt_id: str
    outputs: Mapping[str, Mapping[str, Any]]  # node id -> what the node shows in the UI
    previews: Sequence[bytes]
    ticks: Sequence[Tick]
    error: RunError | None
    duration_s: float
    events: Sequence[Event] = field(repr=False, default=())

    def node_s(self, node: str) -> float:
        """Return how long a node was executed."""
        began = [(one.at_s, one.data.get("node")) for one in self.events if one.type == "executing"]
        return next(after - at for (at, shown), (after, _) in pairwise(began) if shown == node)

    def steps_s(self, node: str) -> list[float]:
        """Return the times between a node's ticks. The first step, which may wait for a model, is
        not among them.
        """
        return [
            after - before for before, after in pairwise(one.at_s for one in self.ticks if one.node == node)
        ]


class PromptRefused(Exception):
    """The server's validation did not accept the graph."""

    def __init__(self, error: RunError):
        super().__init__(str(error))
        self.error = error


class ComfyApi:
    """Speaks to the ComfyUI at `address`, HOST:PORT."""

    address = ""

    def log_tail(self) -> str:
        """The last lines of the server's log, for errors."""
        return "(its log is not known here)"

    def get(self, path: str) -> Any:
        return self._request(path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, body: bytes | None) -> Any:
        """The JSON of the answer, None if it is empty; raises urllib.error.HTTPError (with a code)
        or another OSError.
        """
        request = urllib.request.Request(
            f"http://{self.address}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def queue(self, graph: Graph, client_id: str = "") -> str:
        """Queues without waiting; returns the prompt id. Raises PromptRefused."""
        try:
            return self.post("/prompt", {"prompt": graph, "client_id": client_id})["prompt_id"]
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise PromptRefused(_refusal(json.loads(error.read()))) from error

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def free(self) -> None:
        """Asks ComfyUI to unload every model and drop its caches; it does so before its next
        prompt.
        """
        self.post("/free", {"unload_models": True, "free_memory": True})

    def history(self, prompt_id: str) -> Mapping[str, Any]:
        return self.get(f"/history/{prompt_id}")[prompt_id]

    def run(
        self, graph: Graph, on_event: Callable[[Event], None] | None = None, timeout_s: float = 300.0
    ) -> RunResult:
        """Queues `graph` and waits for its end. An error of the graph is in the result; ServerError
        is for the server itself.

        `on_event` sees every event as it arrives, on the caller's thread, and may call `interrupt`.
        """
        try:
            return asyncio.run(asyncio.wait_for(self._run(graph, on_event), timeout_s))
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise ServerError(
                f"the run did not end within {timeout_s:.0f} s; ComfyUI's last lines:\n{self.log_tail()}"
            ) from error

    async def _run(self, graph: Graph, on_event: Callable[[Event], None] | None) -> RunResult:
        client_id = uuid.uuid4().hex
        started_s = time.perf_counter()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"http://{self.address}/ws?clientId={client_id}", max_msg_size=0) as ws,
            ):
                await ws.send_json(PAGE)
                while (await self._receive(ws)).type != "feature_flags":
                    pass
                prompt_id = self.queue(graph, client_id)
                events = await self._events_of(ws, prompt_id, on_event)
        except PromptRefused as refused:
            return RunResult("", {}, (), (), refused.error, time.perf_counter() - started_s)
        return RunResult(
            prompt_id=prompt_id,
            outputs=self.history(prompt_id)["outputs"],
            previews=[event.image for event in events if event.type == "preview"],
            ticks=[_tick(event) for event in events if event.type == "progress"],
            error=next(
                (
                    _failure(event)
                    for event in events
                    if event.type in ("execution_error", "execution_interrupted")
                ),
                None,
            ),
            duration_s=events[-1].at_s - started_s,
            events=events,
        )

    async def _events_of(
        self,
        ws: aiohttp.ClientWebSocketResponse[bool],
        prompt_id: str,
        on_event: Callable[[Event], None] | None,
    ) -> list[Event]:
        """Every event of this prompt, up to and with its last."""
        events: list[Event] = []
        while not (events and events[-1].type == "executing" and events[-1].data["node"] is None):
            event = await self._receive(ws)
            if event.data.get("prompt_id", prompt_id) == prompt_id:
                events.append(event)
                if on_event is not None:
                    on_event(event)
        return events

    async def _receive(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> Event:
        message = await ws.receive()
        now_s = time.perf_counter()
        if message.type == aiohttp.WSMsgType.TEXT:
            content = json.loads(message.data)
            return Event(content["type"], content["data"], now_s)
        if message.type == aiohttp.WSMsgType.BINARY:
            return _binary_event(message.data, now_s)
        raise ServerError(f"ComfyUI closed the connection during the run; its last lines:\n{self.log_tail()}")


def _binary_event(data: bytes, at_s: float) -> Event:
    """All integers are big-endian, 32 bits: kind, then image format (1 JPEG, 2 PNG) or length of
    the metadata.
    """
    kind, number = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:8], "big")
    if kind == PREVIEW:
        return Event("preview", {}, at_s, data[8:])
    if kind == PREVIEW_WITH_METADATA:
        return Event("preview", json.loads(data[8 : 8 + number]), at_s, data[8 + number :])
    return Event(f"binary {kind}", {}, at_s, data[4:])


def _tick(event: Event) -> Tick:
    return Tick(event.data["node"], event.data["value"], event.data["max"], event.at_s)


def _failure(event: Event) -> RunError:
    data = event.data
    kind = "interrupted" if event.type == "execution_interrupted" else "failed"
    message = data.get("exception_message", kind).strip()
    return RunError(kind, data["node_id"], data["node_type"], message, data.get("exception_type", ""))


def _refusal(answer: Mapping[str, Any]) -> RunError:
    """The first complaint about a node, else about the graph."""
    for node, complaint in answer["node_errors"].items():
        for error in complaint["errors"]:
            return RunError(
                "refused",
                node,
                complaint["class_type"],
                f"{error['message']}: {error['details']}".strip(": "),
            )
    return RunError(
        "refused", "", "", f"{answer['error']['message']}: {answer['error']['details']}".strip(": ")
    )
