"""The routes that PipeMesh adds to ComfyUI's own server, whose rules about origins hold for them.

GET only reads. POST answers with the pool as it is then, or with the sentence that says why nothing
was done. Each answer is made on a thread of its own, so that the server goes on meanwhile: the
first one imports and makes the runtime, which another thread may be doing. ComfyUI compares Origin
and Host on loopback only; PipeMesh checks each POST whatever the Host is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web

from ..parallel_runtime.errors import PipeMeshError
from .auto.mode import Auto

if TYPE_CHECKING:
    from ..parallel_runtime.client.remote_pool import RemotePool
    from ..pool.handle import PoolHandle
    from .runtime import Runtime
    from .status.control import PoolControl

NOT_CACHED = {"Cache-Control": "no-store"}
STATUS = "/pipemesh/status"
JSON = "application/json"  # a page of another origin cannot send it without asking first
NOT_JSON = f"A POST from outside of ComfyUI's own page needs the header Content-Type: {JSON}."
NOT_OWN = (
    "This page is from {0}, but ComfyUI is at {1}: open {1}, or let the proxy before ComfyUI pass the Host"
    " header on."
)
PORTS = {"http": ":80", "https": ":443"}  # that browsers leave out


def add_routes(
    routes: web.RouteTableDef,
    runtime: Callable[[], Runtime],
    auto: Auto,
    is_executing: Callable[[], bool],
) -> None:
    """``is_executing``: ComfyUI runs a prompt now."""

    def control() -> PoolControl:
        from .status.control import PoolControl

        return PoolControl(runtime(), is_executing)

    def asked() -> dict[str, Any]:
        from .status.collection import status_of

        return asdict(status_of(runtime(), auto, control().is_busy))

    async def status(_request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(asked), headers=NOT_CACHED)

    routes.get(STATUS)(status)

    async def acted(name: str, request: web.Request) -> web.Response:
        return await answer(lambda pool: getattr(control(), name)(pool), request)

    routes.post("/pipemesh/pools/{id}/restart")(partial(acted, "restart"))
    routes.post("/pipemesh/pools/{id}/unload")(partial(acted, "unload"))
    routes.post("/pipemesh/pools/{id}/release")(partial(acted, "release"))


async def answer(act: Callable[[str], tuple[PoolHandle, RemotePool]], request: web.Request) -> web.Response:
    """Act on a pool, for a page of ComfyUI's own or a script."""

    def acted() -> dict[str, Any]:
        from .status.collection import pool_status

        return asdict(pool_status(*act(request.match_info["id"])))

    if "Origin" in request.headers:
        if not is_own_page(request.headers["Origin"], request.headers.get("Host", "")):
            return refused(403, NOT_OWN.format(request.headers["Origin"], request.headers.get("Host", "")))
    elif request.content_type != JSON:
        return refused(415, NOT_JSON)
    try:
        return web.json_response(await asyncio.to_thread(acted), headers=NOT_CACHED)
    except PipeMeshError as error:
        return refused(getattr(error, "code", 500), str(error))


def refused(code: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=code, headers=NOT_CACHED)


def is_own_page(origin: str, host: str) -> bool:
    """Return whether a page of this origin came from the server of this Host header. An opaque
    origin, which browsers send as ``null``, is nobody's.
    """
    try:
        page = urlsplit(origin.lower())
    except ValueError:
        return False
    port = PORTS.get(page.scheme, "")
    return bool(page.netloc) and page.netloc.removesuffix(port) == host.lower().removesuffix(port)
