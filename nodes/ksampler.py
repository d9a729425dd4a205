"""KSampler and KSampler Advanced with a pool: the stock nodes' own sockets and code, on a
parallelized MODEL.
"""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

import nodes

from .links import require_links
from .pool import CATEGORY, POOL_TOOLTIP, UNTRIED, Pool
from .runtime import Runtime, parallelized
from .settings import Choice

host_nodes: Any = nodes  # ComfyUI's; a type checker takes this folder for it
SEED = {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF, "control_after_generate": True}
SEED_TOOLTIP = (
    "The random seed used for creating the noise. The same seed gives the same image as the stock sampler."
)


def common_inputs() -> dict[str, io.Input]:
    """Return the inputs that both samplers have, by id."""
    inputs = [
        io.Model.Input(
            "model", tooltip="The model used for denoising. It is parallelized here if it is not yet."
        ),
        io.Int.Input(
            "steps",
            default=20,
            min=1,
            max=10000,
            tooltip="The number of steps used in the denoising process.",
        ),
        io.Float.Input(
            "cfg",
            default=8.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Classifier-free guidance scale.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=comfy.samplers.KSampler.SAMPLERS,
            tooltip="Any stock sampler; it runs unmodified.",
        ),
        io.Combo.Input(
            "scheduler", options=comfy.samplers.KSampler.SCHEDULERS, tooltip="How noise is gradually removed."
        ),
        io.Conditioning.Input("positive", tooltip="What you want to see in the image."),
        io.Conditioning.Input("negative", tooltip="What you want to exclude from the image."),
        io.Latent.Input("latent_image", tooltip="The latent image to denoise."),
        Pool.Input("pool", optional=True, tooltip=POOL_TOOLTIP),
    ]
    return {item.id: item for item in inputs}


def sampler_nodes(runtime: Runtime) -> list[type[io.ComfyNode]]:
    class PipeMeshKSampler(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            common = common_inputs()
            return io.Schema(
                node_id="PipeMeshKSampler",
                display_name="KSampler (PipeMesh)",
                category=CATEGORY,
                is_experimental=UNTRIED,
                description=(
                    "The stock KSampler, its model computed by a pool of workers. "
                    "Same seed, same image; under pipefusion nearly the same."
                ),
                search_aliases=["sampler", "multi gpu", "parallel"],
                inputs=[
                    common["model"],
                    io.Int.Input("seed", **SEED, tooltip=SEED_TOOLTIP),
                    *(
                        common[name]
                        for name in (
                            "steps",
                            "cfg",
                            "sampler_name",
                            "scheduler",
                            "positive",
                            "negative",
                            "latent_image",
                        )
                    ),
                    io.Float.Input(
                        "denoise",
                        default=1.0,
                        min=0.0,
                        max=1.0,
                        step=0.01,
                        tooltip="Lower values keep the structure of the initial image.",
                    ),
                    common["pool"],
                ],
                outputs=[io.Latent.Output(tooltip="The denoised latent.")],
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
            remote = parallelized(runtime, model, pool)
            return io.NodeOutput(*host_nodes.KSampler().sample(remote, **settings))

    class PipeMeshKSamplerAdvanced(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            common = common_inputs()
            return io.Schema(
                node_id="PipeMeshKSamplerAdvanced",
                display_name="KSampler Advanced (PipeMesh)",
                category=CATEGORY,
                is_experimental=UNTRIED,
                description=(
                    "The stock KSampler (Advanced), its model computed by a pool of workers. "
                    "Same seed, same image; under pipefusion nearly the same."
                ),
                search_aliases=["sampler", "multi gpu", "parallel"],
                inputs=[
                    common["model"],
                    io.Combo.Input(
                        "add_noise",
                        options=["enable", "disable"],
                        advanced=True,
                        tooltip="Whether noise is added first.",
                    ),
                    io.Int.Input("noise_seed", **SEED, tooltip=SEED_TOOLTIP),
                    *(
                        common[name]
                        for name in (
                            "steps",
                            "cfg",
                            "sampler_name",
                            "scheduler",
                            "positive",
                            "negative",
                            "latent_image",
                        )
                    ),
                    io.Int.Input(
                        "start_at_step",
                        default=0,
                        min=0,
                        max=10000,
                        advanced=True,
                        tooltip="The first step to run.",
                    ),
                    io.Int.Input(
                        "end_at_step",
                        default=10000,
                        min=0,
                        max=10000,
                        advanced=True,
                        tooltip="The step to stop before.",
                    ),
                    io.Combo.Input(
                        "return_with_leftover_noise",
                        options=["disable", "enable"],
                        advanced=True,
                        tooltip=(
                            "enable: stop with the noise of end_at_step left in, for another sampler to"
                            " go on."
                        ),
                    ),
                    common["pool"],
                ],
                outputs=[io.Latent.Output(tooltip="The denoised latent.")],
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
            remote = parallelized(runtime, model, pool)
            return io.NodeOutput(*host_nodes.KSamplerAdvanced().sample(remote, **settings))

    return [PipeMeshKSampler, PipeMeshKSamplerAdvanced]
