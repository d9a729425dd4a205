"""Reads ComfyUI's queue for the sampling of several prompts together."""

from __future__ import annotations

import comfy.cli_args
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..parallel_runtime.client.alike_prompts import Moment, Pending


def moment_now() -> Moment | None:
    """Return the prompt and node that ComfyUI executes now, and the prompts that wait. None if no
    prompt runs, or if ComfyUI keeps no MODEL from one prompt to the next.
    """
    executing, args = get_executing_context(), comfy.cli_args.args
    if executing is None or args.cache_none or args.disable_smart_memory:
        return None
    running, queued = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    graph = next((item[2] for item in running if item[1] == executing.prompt_id), {})
    others = sorted(queued, key=lambda item: item[:2])  # a heap
    waiting = tuple(Pending(item[1], item[2], tuple(item[4])) for item in others)
    return Moment(executing.prompt_id, str(executing.node_id), executing.list_index, graph, waiting)
