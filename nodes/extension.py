"""The extension that ComfyUI loads: its nodes and its routes."""

from __future__ import annotations

import os
from dataclasses import asdict
from io import BytesIO

from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from comfy_execution.utils import get_executing_context
from server import PromptServer

from .ksampler import sampler_nodes
from .pool import pool_nodes
from .report.node import report_node
from .runtime import Runtime

NOT_CACHED = {"Cache-Control": "no-store"}  # ComfyUI lets a browser keep a .png for a day
NO_TIMELINE = "The last run was not in patches: set pipefusion above 1 on PipeMesh Pool and run."


def show_on_node(text: str) -> None:
    """Put a line of text on the node that ComfyUI executes now."""
    executing = get_executing_context()
    if executing is not None:
        PromptServer.instance.send_progress_text(text, executing.node_id)


class PipeMeshExtension(ComfyExtension):
    def __init__(self) -> None:
        self._runtime = Runtime.of(os.environ, show_on_node)

    async def on_load(self) -> None:
        @PromptServer.instance.routes.get("/pipemesh/report")
        async def report(_request: web.Request) -> web.Response:
            return web.json_response(asdict(self._runtime.report()))

        @PromptServer.instance.routes.get("/pipemesh/timeline.png")
        async def timeline(_request: web.Request) -> web.Response:
            drawn = self._runtime.draw_last_run()
            if drawn is None:
                return web.Response(status=404, text=NO_TIMELINE, headers=NOT_CACHED)
            png = BytesIO()
            drawn.save(png, "PNG")
            return web.Response(body=png.getvalue(), content_type="image/png", headers=NOT_CACHED)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*pool_nodes(self._runtime), *sampler_nodes(self._runtime), report_node(self._runtime)]
