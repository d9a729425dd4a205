"""Host models of every family with a plan, with random weights, odd head counts and no file behind
them: for tests and parity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .tiny import flux_config, random_tensor

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def random_patcher(family: type, unet_config: Mapping[str, Any], seed: int = 0) -> ModelPatcher:
    """A stock MODEL of a class of comfy.supported_models; ``cached_patcher_init`` is None."""
    import comfy.model_patcher
    import torch

    config = family(dict(unet_config))
    config.unet_config.update(unet_config)
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.diffusion_model.state_dict().items()}
    model.load_model_weights({name: random_tensor(name, shape, seed, torch.float32) for name, shape in shapes.items()}, "")
    return comfy.model_patcher.ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def flux2_patcher(heads: int = 5) -> ModelPatcher:
    """Flux 2's form: modulation shared by all blocks, gated MLPs, no biases, four position axes,
    text padded to 512 tokens.
    """
    import comfy.supported_models

    config = {
        **flux_config(heads=heads, axes_dim=(4, 4, 4, 4), context_dim=64),
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "vec_in_dim": None,
        "mlp_ratio": 3.0,
        "theta": 2000,
        "qkv_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "ops_bias": False,
        "txt_ids_dims": [3],
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }
    return random_patcher(comfy.supported_models.Flux2, config)


def wan_patcher(*, model_type: str = "t2v", per_frame: bool = False, heads: int = 5, layers: int = 5) -> ModelPatcher:
    """Wan 2.1 (t2v, i2v), or with ``per_frame`` the 2.2 5B form: 48 channels, one timestep per
    latent frame under a mask.
    """
    import comfy.supported_models

    channels = 48 if per_frame else 16
    config = {
        "image_model": "wan2.1",
        "model_type": model_type,
        "dim": heads * 16,
        "ffn_dim": 96,
        "num_heads": heads,
        "num_layers": layers,
        "in_dim": channels + (20 if model_type == "i2v" else 0),
        "out_dim": channels,
        "text_dim": 64,
        "freq_dim": 32,
        "patch_size": (1, 2, 2),
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }
    families = comfy.supported_models
    family = families.WAN22_T2V if per_frame else families.WAN21_I2V if model_type == "i2v" else families.WAN21_T2V
    return random_patcher(family, config)


def sd3_patcher(*, medium: bool = False, depth: int = 3) -> ModelPatcher:
    """SD3, or with ``medium`` the 3.5 medium form: normalised q and k, a second self-attention in
    the first blocks. Heads = depth.
    """
    import comfy.supported_models

    config = {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": 32,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": depth * 64}},
        "num_patches": 1024,
        "pos_embed_max_size": 32,
        "pos_embed_scaling_factor": None,
        "qk_norm": "rms" if medium else None,
        "x_block_self_attn_layers": [0, 1] if medium else [],
    }
    return random_patcher(comfy.supported_models.SD3, config)
