"""Host models of any configuration with random weights and no file behind them."""

from pipemesh.launcher.tiny import flux_config, random_tensor


def random_patcher(family, unet_config, seed=0):
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


def flux2_patcher(heads=5):
    """Flux 2's form: modulation shared by all blocks, gated MLPs, no biases, four position axes, text padded to 512 tokens."""
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
