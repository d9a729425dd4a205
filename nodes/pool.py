"""PipeMesh Pool and PipeMesh Parallelize. Nothing is started here: the pool comes up when the MODEL
is first sampled.
"""

from __future__ import annotations

from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..parallel_runtime.layout import OF_A_GROUP
from .links import require_links
from .runtime import Runtime, parallelized
from .settings import Choice, PoolSettings, Takes, TakesNumber, TakesOneOf

CATEGORY = "PipeMesh"
UNTRIED = True  # on a GPU: nodes are marked as experimental until lab/docs/CUDA.md has a run there
Pool = io.Custom("PIPEMESH_POOL")
POOL_TOOLTIP = "Which devices work together and how. Without it: all GPUs (two CPU ranks with --cpu)."


def socket(name: str, takes: Takes) -> io.Input:
    shown = {
        "default": takes.default,
        "display_name": takes.label,
        "tooltip": takes.tooltip,
        "optional": True,
        "advanced": takes.advanced,
    }
    if isinstance(takes, TakesNumber):
        return io.Int.Input(name, min=takes.least, max=takes.most, **shown)
    if isinstance(takes, TakesOneOf):
        return io.Combo.Input(name, options=list(takes.options), **shown)
    return io.String.Input(name, **shown)


def pool_nodes(runtime: Runtime) -> list[type[io.ComfyNode]]:
    class PipeMeshPool(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="PipeMeshPool",
                display_name="PipeMesh Pool",
                category=CATEGORY,
                is_experimental=UNTRIED,
                description=(
                    "Chooses the devices that sample one image together. The workers start at the first run"
                    " and stay warm."
                ),
                search_aliases=["multi gpu", "parallel", "sequence parallel", *OF_A_GROUP, "workers"],
                inputs=[socket(name, takes) for name, takes in PoolSettings.inputs().items()],
                outputs=[
                    Pool.Output(
                        display_name="pool", tooltip="For PipeMesh Parallelize and the PipeMesh samplers."
                    )
                ],
            )

        @classmethod
        def validate_inputs(cls, **chosen: Any) -> bool | str:
            """``chosen``: the inputs that the prompt names; None is a linked one."""
            return runtime.check(**chosen)

        @classmethod
        def execute(cls, **chosen: Any) -> io.NodeOutput:
            return io.NodeOutput(runtime.choose(**chosen))

    class PipeMeshParallelize(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="PipeMeshParallelize",
                display_name="PipeMesh Parallelize",
                category=CATEGORY,
                is_experimental=UNTRIED,
                description=(
                    "Makes a MODEL compute on the pool. Everything else stays stock: loaders, LoRA, samplers,"
                    " guiders, previews."
                ),
                search_aliases=["multi gpu", "parallel", "distribute"],
                inputs=[
                    io.Model.Input("model", tooltip="A stock MODEL, with or without LoRA."),
                    Pool.Input("pool", optional=True, tooltip=POOL_TOOLTIP),
                ],
                outputs=[io.Model.Output(tooltip="The same MODEL, sampled by the pool.")],
            )

        @classmethod
        def validate_inputs(cls, model: Any = None, pool: Any = None) -> bool | str:
            return require_links(model=model, pool=pool)

        @classmethod
        def execute(cls, model: ModelPatcher, pool: Choice | None = None) -> io.NodeOutput:
            return io.NodeOutput(parallelized(runtime, model, pool))

    return [PipeMeshPool, PipeMeshParallelize]
