"""PipeMesh Pool, PipeMesh Parallelize and PipeMesh Parallelize VAE. Nothing is started here: the
pool comes up when the MODEL is first sampled, or the VAE first used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..parallel_runtime.layout import OF_A_GROUP
from .settings import Choice, PoolSettings, Takes
from .sockets import PoolSocket, require_links, schema

if TYPE_CHECKING:
    from .runtime import Runtime


def socket(name: str, takes: Takes) -> io.Input:
    shown = {"default": takes.default, "optional": True, "advanced": takes.advanced}
    if takes.options:
        return io.Combo.Input(name, options=list(takes.options), **shown)
    if isinstance(takes.default, int):
        return io.Int.Input(name, min=takes.least, max=takes.most, **shown)
    return io.String.Input(name, **shown)


def pool_nodes(runtime: Callable[[], Runtime]) -> list[type[io.ComfyNode]]:
    class PipeMeshPool(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                "PipeMeshPool",
                [socket(name, takes) for name, takes in PoolSettings.inputs().items()],
                [PoolSocket.Output()],
                search_aliases=["multi gpu", "parallel", "sequence parallel", *OF_A_GROUP, "workers"],
            )

        @classmethod
        async def validate_inputs(cls, **chosen: Any) -> bool | str:
            """``chosen``: the inputs that the prompt names; None is a linked one. The server's
            event loop calls it. The first call makes the runtime, which takes seconds.
            """
            return await asyncio.to_thread(lambda: runtime().check(**chosen))

        @classmethod
        def execute(cls, **chosen: Any) -> io.NodeOutput:
            return io.NodeOutput(runtime().choose(**chosen))

    class PipeMeshParallelize(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                "PipeMeshParallelize",
                [io.Model.Input("model"), PoolSocket.Input("pool", optional=True)],
                [io.Model.Output()],
                search_aliases=["multi gpu", "parallel", "distribute"],
            )

        @classmethod
        def validate_inputs(cls, model: Any = None, pool: Any = None) -> bool | str:
            return require_links(model=model, pool=pool)

        @classmethod
        def execute(cls, model: ModelPatcher, pool: Choice | None = None) -> io.NodeOutput:
            return io.NodeOutput(runtime().parallelized(model, pool))

    class PipeMeshParallelizeVAE(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                "PipeMeshParallelizeVAE",
                [io.Vae.Input("vae"), PoolSocket.Input("pool", optional=True)],
                [io.Vae.Output()],
                search_aliases=["multi gpu", "decode", "encode", "tiled"],
            )

        @classmethod
        def validate_inputs(cls, vae: Any = None, pool: Any = None) -> bool | str:
            return require_links(vae=vae, pool=pool)

        @classmethod
        def execute(cls, vae: Any, pool: Choice | None = None) -> io.NodeOutput:
            from .vaes import parallelized

            return io.NodeOutput(parallelized(runtime(), vae, pool))

    return [PipeMeshPool, PipeMeshParallelize, PipeMeshParallelizeVAE]
