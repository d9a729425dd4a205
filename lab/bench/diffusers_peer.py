"""Run diffusers' Flux with the weights and inputs of ComfyUI's, whole or under diffusers' own
context parallel: the peer of ``bench peers``.

Names and orders as in diffusers@0.42.1 (models/transformers/transformer_flux.py) and
comfy/ldm/flux/model.py@0.30.0. L: tokens of the image; P: numbers in one of them (16 channels of a
patch of 2 x 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

# ComfyUI's modules -> diffusers'. Several of them: each has its own rows of the fused one, `hidden`
# for q, k, v and the rest for the MLP.
ENDS = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
    "linear2": ("proj_out",),
}
BLOCKS = {
    "double_blocks": ("transformer_blocks", DOUBLE),
    "single_blocks": ("single_transformer_blocks", SINGLE),
}
SHIFT_THEN_SCALE = "final_layer.adaLN_modulation.1"  # diffusers: scale, then shift


def diffusers_modules(module: str) -> tuple[str, ...]:
    if module in ENDS:
        return ENDS[module]
    blocks, index, inner = module.split(".", 2)
    their_blocks, modules = BLOCKS[blocks]
    return tuple(f"{their_blocks}.{index}.{name}" for name in modules[inner])


def diffusers_weights(weights: Mapping[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """Rename ComfyUI's weights to diffusers' names. They share their memory, but for the final
    modulation, whose halves change places.
    """
    converted = {}
    for key, tensor in weights.items():
        module, kind = key.rsplit(".", 1)
        names = diffusers_modules(module)
        rows = [hidden] * (len(names) - 1)
        parts = tensor.split([*rows, len(tensor) - sum(rows)])
        if module == SHIFT_THEN_SCALE:
            parts = (torch.cat(tensor.chunk(2)[::-1]),)
        converted.update({f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)})
    return converted


class DiffusersPeer:
    """Evaluate diffusers' model with the weights of ``model`` and its ``arguments``, from tokens to
    tokens: in diffusers packing a latent into tokens is the pipeline's.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any]):
        from diffusers import FluxTransformer2DModel
        from diffusers.utils import logging

        logging.set_verbosity_error()  # it warns of every experimental call
        flux = model.params
        assert (
            flux.theta == 10000
            and flux.mlp_ratio == 4
            and flux.qkv_bias
            and not flux.guidance_embed
            and not flux.txt_ids_dims
        )
        self._model = FluxTransformer2DModel(
            in_channels=model.in_channels,
            num_layers=flux.depth,
            num_single_layers=flux.depth_single_blocks,
            attention_head_dim=sum(flux.axes_dim),
            num_attention_heads=flux.num_heads,
            joint_attention_dim=flux.context_in_dim,
            pooled_projection_dim=flux.vec_in_dim,
            axes_dims_rope=tuple(flux.axes_dim),
        ).eval()
        self._model.load_state_dict(diffusers_weights(model.state_dict(), model.hidden_size), assign=True)
        tokens_BLP, ids_BL3 = model.process_img(arguments["x"])
        self._arguments = {
            "hidden_states": tokens_BLP,
            "encoder_hidden_states": arguments["context"],
            "pooled_projections": arguments["y"],
            "timestep": arguments["timestep"],
            "img_ids": ids_BL3[0],
            "txt_ids": torch.zeros(arguments["context"].shape[1], 3),
        }

    def parallelize(self, ulysses: int) -> None:
        """Turn context parallel on, for good; every rank must call it. The backend is diffusers'
        default, torch's ``scaled_dot_product_attention``.

        diffusers takes the rank modulo the number of accelerators for the index of its device,
        which it then only records: without an accelerator it divides by zero there, so that number
        is one here.
        """
        from diffusers import ContextParallelConfig

        mesh = init_device_mesh("cpu", (1, ulysses), mesh_dim_names=("ring", "ulysses"))
        with patch.object(torch.accelerator, "device_count", return_value=1):
            self._model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ulysses, mesh=mesh))

    def evaluate(self) -> torch.Tensor:
        """Return the tokens (1, L, P), on every rank."""
        return self._model(**self._arguments, return_dict=False)[0]
