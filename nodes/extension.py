"""The extension that ComfyUI loads: its nodes, its routes, and auto mode."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import comfyui_version
import folder_paths
from aiohttp import web
from comfy.cli_args import args
from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from ..parallel_runtime.errors import LayoutError, PipeMeshError
from ..pool.devices import Placement, visible_gpus
from ..pool.rank_setup import tries_hosts
from ..pool.trial.known_hosts import untested
from .auto.mode import Auto
from .auto.switch import FILE, Switch
from .first_use import Once
from .ksampler import sampler_nodes
from .local_devices import all_devices, setup_or_fault
from .notices import Notice, Notices, executed_now
from .pool import pool_nodes
from .prompt_times import PromptTimes
from .report.node import report_node
from .routes import STATUS, add_routes
from .screen import NodeScreen, send_event, show_text, span_of
from .timing import StepTimes
from .waiting import Waiting

if TYPE_CHECKING:
    from .runtime import Runtime

log = logging.getLogger("pipemesh")
PACK = Path(__file__).resolve().parents[1]


def show_on_node(text: str) -> None:
    """Put a line of text on the node that ComfyUI executes now."""
    if node := executed_now()[0]:
        show_text(text, node)


def show_notice(waiting: Waiting, notice: Notice) -> None:
    """Put a notice on its node, and a badge there on the page that has queued the prompt. A notice
    of one GPU ends the wait first, whose last line would cover it.
    """
    if notice.one_gpu:
        waiting.end()
    if notice.node:
        show_text(f"PipeMesh: {notice.text}", notice.node)
        send_event("pipemesh.notice", notice)


def settings_file() -> Path | None:
    """Return the file of ComfyUI's settings; None if every user has their own settings."""
    folder = None if args.multi_user else folder_paths.get_public_user_directory("default")
    return Path(folder) / FILE if folder else None


def first_line(placement: Placement, auto_is_on: bool) -> str:
    """Say which devices there are, and whether every sampler takes them."""
    names, auto = ", ".join(device.name for device in placement.devices), "on" if auto_is_on else "off"
    if not placement.devices[0].is_gpu:
        return f"No GPU here: {len(placement.devices)} ranks on the CPU stand for GPUs. Auto mode is {auto}."
    if placement.is_one_gpu:
        return f"One GPU ({names}): there is no second one to share an image with."
    return f"{len(placement.devices)} GPUs ({names}), {placement.backend}. Auto mode is {auto}."


def tell_of_graphs(asked: str) -> None:
    """Say that workers record CUDA graphs, or that the variable's value asks for nothing."""
    if asked in ("1", "all"):
        log.info(
            "[PipeMesh] PIPEMESH_GRAPHS=%s: workers on NVIDIA GPUs record CUDA graphs of what they compute"
            " between messages. No GPU has replayed these yet.",
            asked,
        )
    elif asked not in ("", "0"):
        log.error("[PipeMesh] PIPEMESH_GRAPHS is %s, and counts as 0: set it to 1 or 0.", asked)


def folder_with_routes(routes: Iterable[web.AbstractRouteDef]) -> Path | None:
    """Return the folder of a copy of the pack that ComfyUI has loaded before; None if there is
    none. Both would replace the same methods.
    """
    for route in routes:
        if isinstance(route, web.RouteDef) and route.path == STATUS:
            return Path(inspect.getfile(route.handler)).resolve().parents[1]
    return None


class PipeMeshExtension(ComfyExtension):
    """Gives ComfyUI the nodes, the routes and auto mode when it starts. The runtime, which imports
    all that plans, starts and feeds ranks, is made for the first caller that asks for it.
    """

    def __init__(self) -> None:
        self._setup, fault = setup_or_fault(os.environ)
        screen = NodeScreen()
        waiting = Waiting(screen)
        notices = Notices(partial(show_notice, waiting))
        switch = Switch(os.environ, settings_file)
        prompts = PromptTimes(lambda: executed_now()[1], span_of)
        times = StepTimes(
            lambda run: self._runtime().predicted(run), first_step=waiting.came, prompts=prompts
        )

        def runtime() -> Runtime:
            from .prompt_queue import moment_now
            from .runtime import Runtime

            return Runtime(
                self._setup, show_on_node, fault, notices, waiting, times, moment_now, switch.looks_ahead
            )

        self._runtime = Once(runtime)
        self._auto = Auto(self._runtime, switch, notices, times)

    async def on_load(self) -> None:
        server = PromptServer.instance
        if other := folder_with_routes(server.routes):
            raise PipeMeshError(
                f"PipeMesh is among the custom nodes twice, in {other} and in {PACK}: remove one of the two"
                " folders."
            )
        add_routes(
            server.routes, self._runtime, self._auto, lambda: bool(server.prompt_queue.currently_running)
        )
        self._auto.install()
        if said := untested(comfyui_version.__version__, is_tried=tries_hosts(os.environ)):
            log.info("[PipeMesh] %s", said)
        tell_of_graphs(os.environ.get("PIPEMESH_GRAPHS", ""))
        with suppress(LayoutError):  # a sampler will say it
            devices = all_devices(visible_gpus(args.cpu)).placement
            log.info("[PipeMesh] %s", first_line(devices, self._auto.is_on()))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [*pool_nodes(self._runtime), *sampler_nodes(self._runtime), report_node(self._runtime)]
