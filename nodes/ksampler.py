"""KSampler and KSampler Advanced with a pool: the stock nodes' own sockets and code, on a
parallelized MODEL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

import nodes

from .settings import Choice
from .sockets import PoolSocket, require_links, schema

if TYPE_CHECKING:
    from .runtime import Runtime

host_nodes: Any = nodes  # ComfyUI's; a type checker takes this folder for it


def sampler_nodes(runtime: Callable[[], Runtime]) -> list[type[io.ComfyNode]]:
    return [
        sampler_node(runtime, host_nodes.KSampler, "PipeMeshKSampler"),
        sampler_node(runtime, host_nodes.KSamplerAdvanced, "PipeMeshKSamplerAdvanced"),
    ]


def sampler_node(runtime: Callable[[], Runtime], stock: type[Any], name: str) -> type[io.ComfyNode]:
    class Sampler(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema(
                name,
                [*sockets_of(stock), PoolSocket.Input("pool", optional=True)],
                [io.Latent.Output()],
                search_aliases=["sampler", "multi gpu", "parallel"],
            )

        @classmethod
        def validate_inputs(
            cls,
            model: Any = None,
            positive: Any = None,
            negative: Any = None,
            latent_image: Any = None,
            pool: Any = None,
        ) -> bool | str:
            return require_links(
                model=model, positive=positive, negative=negative, latent_image=latent_image, pool=pool
            )

        @classmethod
        def execute(cls, model: ModelPatcher, pool: Choice | None = None, **settings: Any) -> io.NodeOutput:
            remote = runtime().parallelized(model, pool)
            return io.NodeOutput(*stock().sample(remote, **settings))

    return Sampler


def sockets_of(stock: type[Any]) -> list[io.Input]:
    """Return the inputs that a stock node requires, as this ComfyUI has them."""
    found = []
    for name, (kind, *more) in stock.INPUT_TYPES()["required"].items():
        options = {key: value for one in more for key, value in one.items() if key != "tooltip"}
        made = io.Combo.Input(name, options=kind) if isinstance(kind, list) else io.Custom(kind).Input(name)
        made.extra_dict = options
        made.tooltip = next((one["tooltip"] for one in more if "tooltip" in one), None)
        found.append(made)
    return found
