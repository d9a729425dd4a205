"""Predict the time of decoding with a VAE: it runs without content on a device that is not there,
and what it computes takes one device, or several by bands of rows, as long as their speeds say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...parallel_runtime.planner.box import Box
from ...parallel_runtime.planner.dry_device import DEVICE, DeviceCounts, computing_dry
from ...parallel_runtime.planner.fake_mode import QuickFakeMode

STARTED = 30  # kernels beside its own for each message, counted of ``methods/vae_bands.py``
# As comfy.sd.VAE makes them of their files
KL = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "num_res_blocks": 2}
KL |= {"ch_mult": [1, 2, 4, 4], "attn_resolutions": [], "dropout": 0.0}
WAN = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
KLS: dict[str, dict[str, Any]] = {  # by the names of ComfyUI's latent formats
    "SD15": {"z_channels": 4},
    "SDXL": {"z_channels": 4},
    "SD3": {"z_channels": 16},
    "Flux": {"z_channels": 16},
    "Flux2": {"z_channels": 32, "batch_norm_latent": True},
    "HunyuanVideo": {"z_channels": 16, "conv3d": True, "time_compress": 4},
}


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What decoding one picture or video takes on one device. ``moved``, (bytes, kernels): how many
    kernels beside products read and write so many bytes. ``messages``: of ranks that have bands.
    """

    flops: int
    moved: Sequence[tuple[int, int]]
    launches: int
    messages: int
    picture_bytes: int


def vae_of(latent_format: str, width: int = 0) -> torch.nn.Module | None:
    """Make the VAE of latents of a format of ComfyUI's; None where it is not known. ``width``:
    channels of its widest rows, 0 for as many as released ones have.
    """
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.wan import vae, vae2_2

    if latent_format in KLS:
        form = {**KL, **KLS[latent_format], **({"ch": width} if width else {})}
        return AutoencoderKL(ddconfig=form, embed_dim=form["z_channels"])
    if latent_format == "Wan21":
        return vae.WanVAE(dim=width or 96, z_dim=16, **WAN)
    return vae2_2.WanVAE(dim=width or 160, z_dim=48, **WAN) if latent_format == "Wan22" else None


def counted(latent_format: str, shape: Sequence[int]) -> Decoding | None:
    """Count the decoding of a latent (B, C, ...) in bf16; None where its VAE is not known."""
    return counted_of(partial(vae_of, latent_format), shape, torch.bfloat16)


def counted_of(
    make: Callable[[], torch.nn.Module | None], shape: Sequence[int], dtype: torch.dtype
) -> Decoding | None:
    """Likewise, of the VAE that ``make`` makes."""
    from comfy.ldm.modules.diffusionmodules.model import pytorch_attention

    mode, calls, before = QuickFakeMode(), list[int](), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with computing_dry(mode, DeviceCounts()), DEVICE:
            model, samples = make(), torch.empty(tuple(shape))
    finally:
        torch.set_default_dtype(before)
    if model is None:
        return None
    for module in model.modules():
        if hasattr(module, "optimized_attention"):
            module.optimized_attention = pytorch_attention  # as on GPUs
        is_window = isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) and module.kernel_size[-2] > 1
        if is_window or isinstance(module, torch.nn.GroupNorm) or hasattr(module, "optimized_attention"):
            module.register_forward_hook(lambda *_: calls.append(1))
    with computing_dry(mode, DeviceCounts()) as counts:
        picture = model.decode(samples)  # pyright: ignore[reportCallIssue]
    moved = sorted((size, kernels) for size, kernels in counts.moved.items() if size)
    return Decoding(
        flops=counts.flops,
        moved=moved,
        launches=counts.launches,
        messages=len(calls),
        picture_bytes=picture.nbytes,
    )


def decoding_s(decoding: Decoding, box: Box) -> float:
    """Return the seconds that all devices of a box take, each with a band of the rows. The first
    one gathers the picture.
    """
    ranks, slowest = len(box.devices), min(box.devices, key=lambda one: one.matmul_flops_per_s)
    computing = decoding.flops / ranks / slowest.matmul_flops_per_s
    computing += sum(kernels * slowest.moving_s(size / ranks) for size, kernels in decoding.moved)
    if ranks == 1:
        return max(computing, decoding.launches * slowest.launch_s)
    starting = (decoding.launches + STARTED * decoding.messages) * slowest.launch_s
    gathered = decoding.picture_bytes * (1 - 1 / ranks) / min(one.bytes_per_s for one in box.levels)
    return max(computing + decoding.messages * box.exchange_s(ranks), starting) + gathered
