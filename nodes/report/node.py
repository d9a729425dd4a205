"""PipeMesh Report: the last run of a pool, as text on the node, and as a picture where stages
worked one behind the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from PIL.Image import Image

from ...parallel_runtime.client.run_picture import draw_run
from ..runtime import Runtime
from ..settings import Choice
from ..sockets import Pool, require_links, schema
from ..status.collection import pool_status, run_status
from .text import plan_heads, report_text

NO_LATENT = "PipeMesh Report has no latent to pass on: connect the sampler's LATENT to its latent input."


def text_of(runtime: Runtime, only: Choice | None) -> str:
    """Report the run that began last, in any pool or in ``only`` one."""
    pools, last = [pool_status(*one) for one in runtime.pools(only)], runtime.last_run(only)
    run = run_status(runtime, *last) if last is not None else None
    return report_text(pools, run, runtime.notices.latest(), only and only.placement)


def draw_last_run(runtime: Runtime, only: Choice | None = None) -> Image | None:
    """Draw the run that began last, in any pool or in ``only`` one. None unless it was sampled in
    patches, over gloo: NCCL works beside the clock that ranks look at.
    """
    last = runtime.last_run(only)
    if last is None or last[0].placement.backend == "nccl":
        return None
    handle, pool, run = last
    names = [f"{rank} {device.name}" for rank, device in enumerate(handle.placement.devices)]
    return draw_run(names, list(run.evaluations), plan_heads(run_status(runtime, handle, pool, run).plan))


def report_node(runtime: Runtime) -> type[io.ComfyNode]:
    class PipeMeshReport(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                "PipeMeshReport",
                [io.Latent.Input("latent", optional=True), Pool.Input("pool", optional=True)],
                [io.Latent.Output(), io.String.Output()],
                search_aliases=["multi gpu", "speed", "memory", "benchmark", "statistics"],
                is_output_node=True,
            )

        @classmethod
        def validate_inputs(cls, latent: Any = None, pool: Any = None) -> bool | str:
            return require_links(latent=latent, pool=pool)

        @classmethod
        def fingerprint_inputs(cls, **given: Any) -> str | float:
            """Behind a sampler the node runs when the sampler does: a run that ComfyUI has kept has
            its report already, and what is behind the node is kept too. Without a latent nothing
            tells when a run was, so it runs each time.
            """
            return "" if "latent" in given else float("nan")

        @classmethod
        def execute(cls, latent: dict[str, Any] | None = None, pool: Choice | None = None) -> io.NodeOutput:
            text, drawn = text_of(runtime, pool), draw_last_run(runtime, pool)
            shown = ui.PreviewText(text).as_dict()
            if drawn is not None:
                pixels = torch.from_numpy(np.array(drawn, dtype=np.float32) / 255)
                shown |= ui.PreviewImage(pixels.unsqueeze(0), cls=cls).as_dict()
            return io.NodeOutput(ExecutionBlocker(NO_LATENT) if latent is None else latent, text, ui=shown)

    return PipeMeshReport
