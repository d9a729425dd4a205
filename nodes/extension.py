"""The extension that ComfyUI loads: its nodes, its routes, and auto mode."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import ComfyExtension, io
from comfy_execution.utils import get_executing_context
from server import PromptServer

from .auto.sampling import Auto
from .auto.switch import FILE, Switch
from .ksampler import sampler_nodes
from .notices import Notice, Notices
from .pool import pool_nodes
from .report.node import report_node
from .routes import add_routes
from .runtime import Runtime
from .screen import NodeScreen
from .status.control import PoolControl
from .waiting import Waiting


def show_on_node(text: str) -> None:
    """Put a line of text on the node that ComfyUI executes now."""
    executing = get_executing_context()
    if executing is not None:
        PromptServer.instance.send_progress_text(text, executing.node_id)


def show_notice(notice: Notice) -> None:
    """Put a notice on its node, and a badge there in the browser that has queued the prompt."""
    server = PromptServer.instance
    if notice.node:
        server.send_progress_text(f"PipeMesh: {notice.text}", notice.node)
        server.send_sync("pipemesh.notice", asdict(notice), server.client_id)


def settings_file() -> Path | None:
    """Return the file of ComfyUI's settings; None where every user has their own."""
    folder = None if args.multi_user else folder_paths.get_public_user_directory("default")
    return Path(folder) / FILE if folder else None


class PipeMeshExtension(ComfyExtension):
    def __init__(self) -> None:
        notices = Notices(show_notice)
        self._runtime = Runtime.of(os.environ, show_on_node, notices, Waiting(NodeScreen()))
        self._auto = Auto(self._runtime, Switch(os.environ, settings_file), notices, self._runtime.times)

    async def on_load(self) -> None:
        server = PromptServer.instance
        control = PoolControl(self._runtime, lambda: bool(server.prompt_queue.currently_running))
        add_routes(server.routes, self._runtime, self._auto, control)
        self._auto.install()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*pool_nodes(self._runtime), *sampler_nodes(self._runtime), report_node(self._runtime)]
