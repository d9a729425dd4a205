"""PipeMesh Report: the last run of a pool, as text on the node, and as a picture where stages
worked one behind the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..links import require_links
from ..pool import CATEGORY, UNTRIED, Pool
from ..runtime import Choice, Runtime
from .text import report_text

NO_LATENT = "PipeMesh Report has no latent to pass on: connect the sampler's LATENT to its latent input."


def report_node(runtime: Runtime) -> type[io.ComfyNode]:
    class PipeMeshReport(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="PipeMeshReport",
                display_name="PipeMesh Report",
                category=CATEGORY,
                is_experimental=UNTRIED,
                description=(
                    "Shows what the pool did in its last run: layout, time per evaluation, communication,"
                    " memory of every rank."
                ),
                search_aliases=["multi gpu", "speed", "memory", "benchmark", "statistics"],
                is_output_node=True,
                inputs=[
                    io.Latent.Input(
                        "latent",
                        optional=True,
                        tooltip=(
                            "The sampler's LATENT, so that the report comes after the run. It is passed on."
                        ),
                    ),
                    Pool.Input(
                        "pool",
                        optional=True,
                        tooltip="Which pool to report on. Without it: the one that sampled last.",
                    ),
                ],
                outputs=[
                    io.Latent.Output(tooltip="The latent, unchanged."),
                    io.String.Output(display_name="report", tooltip="The text that the node shows."),
                ],
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
            text = report_text(runtime.report(pool), pool and pool.placement)
            shown, drawn = ui.PreviewText(text).as_dict(), runtime.draw_last_run(pool)
            if drawn is not None:
                pixels = torch.from_numpy(np.array(drawn, dtype=np.float32) / 255)
                shown |= ui.PreviewImage(pixels.unsqueeze(0), cls=cls).as_dict()
            return io.NodeOutput(ExecutionBlocker(NO_LATENT) if latent is None else latent, text, ui=shown)

    return PipeMeshReport
