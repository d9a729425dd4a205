"""A pack of another author's, as a real ComfyUI loads it in tests: nodes that stock has not."""

from __future__ import annotations

import socket
from typing import Any

import torch

POOLED_DIM = 32  # of the prompts that tests make


def unet(kind: str = "SD15") -> Any:
    """A MODEL that is no transformer: a tiny UNet with random weights, of ComfyUI's ``kind``."""
    import comfy.supported_models

    adm = (
        {"num_classes": "sequential", "adm_in_channels": POOLED_DIM + 6 * 256}
        if kind == "SDXL"
        else {"adm_in_channels": None}
    )
    config = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 64,
        "num_res_blocks": [1],
        "channel_mult": [1],
    }
    config |= {
        "transformer_depth": [1],
        "transformer_depth_middle": 1,
        "transformer_depth_output": [1, 1],
        "context_dim": 64,
    }
    config |= {"use_spatial_transformer": True, "legacy": False, "use_linear_in_transformer": False, **adm}
    return random_model(getattr(comfy.supported_models, kind)({**config, "use_temporal_attention": False}))


def video_unet() -> Any:
    """A MODEL of ComfyUI's whose batch is the frames of one video, which its layers mix."""
    import comfy.supported_models

    config = {
        "image_size": 32,
        "in_channels": 8,
        "out_channels": 4,
        "model_channels": 64,
        "num_res_blocks": [1],
        "channel_mult": [1],
        "transformer_depth": [1],
        "context_dim": 64,
        "transformer_depth_middle": 1,
        "transformer_depth_output": [1, 1],
        "legacy": False,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": True,
        "num_heads": -1,
        "num_head_channels": 32,
        "num_classes": "sequential",
        "adm_in_channels": 768,
        "use_temporal_attention": True,
        "use_temporal_resblock": True,
        "extra_ff_mix_layer": True,
        "use_spatial_context": True,
        "merge_strategy": "learned_with_images",
        "merge_factor": 0.0,
        "video_kernel_size": [3, 1, 1],
        "disable_temporal_crossattention": False,
    }
    made = comfy.supported_models.SVD_img2vid(config)
    made.unet_config.update(config)
    return random_model(made)


def random_model(config: Any) -> Any:
    from comfy.model_patcher import ModelPatcher

    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.diffusion_model.parameters():
            normal = torch.randn(weight.shape, generator=generator)
            weight.copy_(
                normal * weight[0].numel() ** -0.5 if weight.dim() > 1 else torch.full_like(weight, 0.5)
            )
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def without_plan(model: Any) -> Any:
    """Makes a MODEL's transformer one of a class that nobody has looked at."""
    transformer = model.model.diffusion_model
    transformer.__class__ = type("Unplanned", (type(transformer),), {"__module__": "comfy.ldm.unplanned"})
    return model


class OutOfMemory:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "run", True, "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def run(self, samples):
        raise torch.cuda.OutOfMemoryError("Allocation on device")


class UNet:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def run(self):
        return (unet(),)


class WithoutPlan:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"unet_name": ("STRING",)}}

    def run(self, unet_name):
        import comfy.sd
        import folder_paths

        return (
            without_plan(
                comfy.sd.load_diffusion_model(folder_paths.get_full_path("diffusion_models", unet_name))
            ),
        )


class AttentionPatch:
    """Code of its own inside the model's blocks."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        made = model.clone()
        made.set_model_attn1_patch(halved_keys)
        return (made,)


def halved_keys(q, k, v, **_):
    return {"q": q, "k": k * 0.5, "v": v}


class Picture:
    """Shows three channels of a latent, so that it can be saved as a PNG without a VAE."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "run", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def run(self, samples):
        return (torch.sigmoid(samples["samples"][:, :3]).movedim(1, -1).cpu(),)


class Hold:
    """Gives the latent once the other end of a connection to this port is closed."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "port": ("INT", {"max": 1 << 16})}}

    @classmethod
    def IS_CHANGED(cls, samples, port):
        return float("nan")

    def run(self, samples, port):
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.recv(1)
        return (samples,)


NODE_CLASS_MAPPINGS = {
    "TestHold": Hold,
    "TestOutOfMemory": OutOfMemory,
    "TestUNet": UNet,
    "TestWithoutPlan": WithoutPlan,
    "TestAttentionPatch": AttentionPatch,
    "TestPicture": Picture,
}
