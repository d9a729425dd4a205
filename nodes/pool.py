"""PipeMesh Pool and PipeMesh Parallelize. Nothing is started here: the pool comes up when the MODEL
is first sampled.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .runtime import Runtime

CATEGORY = "PipeMesh"
Pool = io.Custom("PIPEMESH_POOL")
POOL_TOOLTIP = "Which devices work together and how. Without it: all GPUs (or two CPU ranks)."


def pool_inputs() -> list[io.Input]:
    return [
        io.String.Input(
            "devices",
            default="auto",
            tooltip="auto, cpu, or one device per rank: cuda:0,cuda:1. Another host's: node1/cuda:0. "
            "The same GPU may be named twice with backend gloo.",
        ),
        io.Int.Input(
            "ulysses",
            default=2,
            min=1,
            max=32,
            tooltip="Ranks that share the tokens of one image (Ulysses sequence parallelism). Same result as on one GPU.",
        ),
        io.Int.Input(
            "ring",
            default=1,
            min=1,
            max=32,
            optional=True,
            tooltip="Groups of ulysses ranks that pass keys and values around a ring. Ranks = ulysses x ring. Same result as on one GPU.",
        ),
        io.Int.Input(
            "pipefusion",
            default=1,
            min=1,
            max=32,
            optional=True,
            tooltip="Stages that the model's blocks are shared out over; within a stage ulysses ranks share the tokens. "
            "Ranks = ulysses x pipefusion, ring must be 1. Approximate: above 1 the image differs a little from that of one GPU.",
        ),
        io.Combo.Input(
            "backend",
            options=["auto", "nccl", "gloo"],
            default="auto",
            tooltip="How ranks exchange data. auto: nccl where every rank has its own GPU, else gloo through host memory.",
            advanced=True,
        ),
        io.Int.Input(
            "patches",
            default=0,
            min=0,
            max=64,
            optional=True,
            advanced=True,
            tooltip="With pipefusion above 1: how many patches go through the stages one behind the other. 0: one more than stages.",
        ),
        io.Int.Input(
            "warm_up",
            default=1,
            min=1,
            max=10000,
            optional=True,
            advanced=True,
            tooltip="With pipefusion above 1: how many first evaluations of the model are whole and exact. "
            "Evaluations, not steps: some samplers make several per step. More is closer to the image of one GPU, and slower.",
        ),
        io.String.Input(
            "stages",
            default="",
            optional=True,
            advanced=True,
            tooltip="With pipefusion above 1: how many of the model's blocks each stage gets, as in 20,37. "
            "Empty: balanced by what the blocks are measured to cost.",
        ),
    ]


def pool_nodes(runtime: Runtime) -> list[type[io.ComfyNode]]:
    class PipeMeshPool(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="PipeMeshPool",
                display_name="PipeMesh Pool",
                category=CATEGORY,
                description="Chooses the devices that sample one image together. The workers start at the first run and stay warm.",
                search_aliases=["multi gpu", "parallel", "sequence parallel", "ulysses", "pipefusion", "workers"],
                inputs=pool_inputs(),
                outputs=[Pool.Output(display_name="pool", tooltip="For PipeMesh Parallelize and the PipeMesh samplers.")],
            )

        @classmethod
        def validate_inputs(
            cls,
            devices: str = "auto",
            ulysses: int = 2,
            backend: str = "auto",
            ring: int = 1,
            pipefusion: int = 1,
            patches: int = 0,
            stages: str = "",
        ) -> bool | str:
            return runtime.check(
                devices=devices, ulysses=ulysses, ring=ring, backend=backend, pipefusion=pipefusion, patches=patches, stages=stages
            )

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
                description="Makes a MODEL compute on the pool. Everything else stays stock: loaders, LoRA, samplers, guiders, previews.",
                search_aliases=["multi gpu", "parallel", "distribute"],
                inputs=[
                    io.Model.Input("model", tooltip="A stock MODEL, with or without LoRA."),
                    Pool.Input("pool", optional=True, tooltip=POOL_TOOLTIP),
                ],
                outputs=[io.Model.Output(tooltip="The same MODEL, sampled by the pool.")],
            )

        @classmethod
        def execute(cls, model, pool=None) -> io.NodeOutput:
            return io.NodeOutput(runtime.parallelize(model, pool))

    return [PipeMeshPool, PipeMeshParallelize]
