"""PipeMesh Report: the last run of a pool, as text on the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..settings import Choice
from ..sockets import PoolSocket, require_links, schema

if TYPE_CHECKING:
    from ..runtime import Runtime

NO_LATENT = "PipeMesh Report has no latent to pass on: connect the sampler's LATENT to its latent input."


def report_node(runtime: Callable[[], Runtime]) -> type[io.ComfyNode]:
    class PipeMeshReport(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                "PipeMeshReport",
                [io.Latent.Input("latent", optional=True), PoolSocket.Input("pool", optional=True)],
                [io.Latent.Output(), io.String.Output()],
                search_aliases=["multi gpu", "speed", "memory", "benchmark", "statistics"],
                is_output_node=True,
            )

        @classmethod
        def validate_inputs(cls, latent: Any = None, pool: Any = None) -> bool | str:
            return require_links(latent=latent, pool=pool)

        @classmethod
        def fingerprint_inputs(cls, **given: Any) -> str | float:
            """Makes the node run whenever its sampler does: without a latent nothing tells when
            that is, so the node runs at each prompt.
            """
            return "" if "latent" in given else float("nan")

        @classmethod
        def execute(cls, latent: dict[str, Any] | None = None, pool: Choice | None = None) -> io.NodeOutput:
            from .text import text_of

            text = text_of(runtime(), pool)
            shown = ui.PreviewText(text).as_dict()
            return io.NodeOutput(ExecutionBlocker(NO_LATENT) if latent is None else latent, text, ui=shown)

    return PipeMeshReport
