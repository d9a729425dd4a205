"""The demo's nodes: conditioning without a text encoder, and a latent saved bit for bit."""

from __future__ import annotations

from pathlib import Path

import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io
from safetensors.torch import save_file

from .captions import conditioning, example, parse_caption


class DemoConditioning(io.ComfyNode):
    """A prompt without a text encoder: the same seed gives the same conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PipeMeshDemoConditioning",
            display_name="PipeMesh Demo Conditioning",
            category="PipeMesh/demo",
            inputs=[
                io.Int.Input("seed", default=0, min=0, max=2**63 - 1),
                io.Int.Input("tokens", default=77, min=1, max=4096),
                io.Int.Input("context_dim", default=64, min=1, max=8192),
                io.Int.Input("vec_dim", default=32, min=1, max=8192),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed: int, tokens: int, context_dim: int, vec_dim: int) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn(1, tokens, context_dim, generator=generator)
        pooled = torch.randn(1, vec_dim, generator=generator)
        return io.NodeOutput([[context, {"pooled_output": pooled}]])


class DemoCaption(io.ComfyNode):
    """The conditioning of a caption of the demo's picture set; of none where it is empty."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PipeMeshDemoCaption",
            display_name="PipeMesh Demo Caption",
            category="PipeMesh/demo",
            inputs=[io.String.Input("caption", default=example())],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def validate_inputs(cls, caption: str | None) -> bool | str:
        """The caption of a linked node is not known yet: it is looked at when this node runs."""
        try:
            cls.execute(caption or "")
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, caption: str) -> io.NodeOutput:
        tokens = conditioning(parse_caption(caption) if caption.strip() else None)[None]
        return io.NodeOutput([[tokens, {"pooled_output": tokens.flatten(1)}]])


class DemoSaveLatent(io.ComfyNode):
    """Writes NAME.safetensors with the tensor `latent`, bit for bit, into ComfyUI's output
    folder.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PipeMeshDemoSaveLatent",
            display_name="PipeMesh Demo Save Latent",
            category="PipeMesh/demo",
            is_output_node=True,
            inputs=[io.Latent.Input("samples"), io.String.Input("name", default="latent")],
        )

    @classmethod
    def validate_inputs(cls, name: str | None) -> bool | str:
        return True if name is None or is_plain(name) else f"name must be a plain file name, got {name!r}"

    @classmethod
    def execute(cls, samples: dict, name: str) -> io.NodeOutput:
        if not is_plain(name):
            raise ValueError(f"name must be a plain file name, got {name!r}")
        file = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"latent": samples["samples"].cpu().contiguous()}, file)
        return io.NodeOutput(ui={"text": [file.name]})


def is_plain(name: str) -> bool:
    return bool(name) and Path(name).name == name


class DemoExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [DemoConditioning, DemoCaption, DemoSaveLatent]
