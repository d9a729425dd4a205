"""The extension: its nodes and routes."""

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


def show_on_node(text: str) -> None:
    """Of the node that is executed, if one is."""
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
            drawn = self._runtime.timeline()
            if drawn is None:
                return web.Response(status=404, text="The last run was not in patches: set pipefusion above 1 on PipeMesh Pool and run.")
            png = BytesIO()
            drawn.save(png, "PNG")
            return web.Response(body=png.getvalue(), content_type="image/png")

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*pool_nodes(self._runtime), *sampler_nodes(self._runtime), report_node(self._runtime)]
