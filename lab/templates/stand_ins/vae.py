"""VAEs in place of files: ComfyUI's own VAE class around a small codec of the right channels and
compression, which averages pixels and repeats latents.
"""

from __future__ import annotations

import math
from typing import Any

import comfy.ldm.lightricks.vae.audio_vae
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import torch
from torch.nn import functional

from ....parallel_runtime.families.sample import random_tensor
from ..cut import cut_picture
from .names import SoundShape, VaeShape

CELLS = 2  # a latent sees the colours of so many squares along an edge


class Statistics(torch.nn.Module):
    """Of a latent format whose channels are normal already."""

    def normalize(self, latent: torch.Tensor) -> torch.Tensor:
        return latent

    def un_normalize(self, latent: torch.Tensor) -> torch.Tensor:
        return latent


class Codec(torch.nn.Module):
    """Pictures (B, 3, H, W) or videos (B, 3, T, H, W) to latents and back. Pictures that a node
    made large are cut first, as sizes in the graph are.
    """

    def __init__(self, shape: VaeShape):
        super().__init__()
        self.shape = shape
        self.cells = min(CELLS, shape.side)
        self.mix = torch.nn.Parameter(
            random_tensor("mix", (shape.channels, 3 * self.cells**2), 0, torch.float32), requires_grad=False
        )
        self.per_channel_statistics = Statistics()

    def encode(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        height, width = (size // self.shape.side for size in cut_picture(*pixels.shape[-2:]))
        frames = self.shape.to_latents(pixels.shape[2]) if pixels.ndim == 5 else 1
        flat = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        seen = functional.adaptive_avg_pool3d(flat, (frames, height * self.cells, width * self.cells))
        # B, 3, T, H, cells, W, cells
        seen = seen.unflatten(-1, (width, self.cells)).unflatten(-3, (height, self.cells))
        seen = seen.permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
        latent = (seen @ self.mix.T).movedim(-1, 1)
        return latent if pixels.ndim == 5 else latent.squeeze(2)

    def decode(self, latent: torch.Tensor, **_: Any) -> torch.Tensor:
        pixels = torch.einsum("oc,bc...->bo...", self.mix[:, : 3 * self.cells : self.cells].T, latent).tanh()
        pixels = pixels.repeat_interleave(self.shape.side, -1).repeat_interleave(self.shape.side, -2)
        if latent.ndim == 5:
            frames = self.shape.to_frames(latent.shape[2])
            pixels = pixels[:, :, torch.linspace(0, latent.shape[2] - 1, frames).round().long()]
        return pixels


class SoundCodec(torch.nn.Module):
    """Waveforms (B, 2, samples) to latents (B, C, T, bins) or (B, C, 2, T), and back."""

    def __init__(self, shape: SoundShape):
        super().__init__()
        self.shape = shape
        self.output_sample_rate = shape.rate
        self.latent_frequency_bins = shape.bins
        self.latents_per_second = shape.per_second
        self.mix = torch.nn.Parameter(
            random_tensor("mix", (shape.channels, 1), 0, torch.float32), requires_grad=False
        )

    def num_of_latents_from_frames(self, frames_number: int, frame_rate: float) -> int:
        """As this ComfyUI counts them: one rounds up, another to the nearest."""
        real: Any = comfy.ldm.lightricks.vae.audio_vae.AudioVAE
        return real.num_of_latents_from_frames(self, frames_number, frame_rate)

    def encode(self, waveform: torch.Tensor, **_: Any) -> torch.Tensor:
        count = math.ceil(waveform.shape[-1] / self.shape.rate * self.shape.per_second)
        if self.shape.bins:
            loudness = functional.adaptive_avg_pool1d(waveform.mean(1, keepdim=True), count * self.shape.bins)
            return loudness.unflatten(-1, (count, self.shape.bins)) * self.mix[None, :, :, None]
        return functional.adaptive_avg_pool1d(waveform, count).unsqueeze(1) * self.mix[None, :, :, None]

    def decode(self, latent: torch.Tensor, **_: Any) -> torch.Tensor:
        count = latent.shape[2] if self.shape.bins else latent.shape[-1]
        return latent.new_zeros(latent.shape[0], 2, round(count / self.shape.per_second * self.shape.rate))


def empty_vae(codec: torch.nn.Module) -> Any:
    """ComfyUI's VAE with nothing of a file but ``codec``."""
    vae = comfy.sd.VAE(sd={})  # sets what every VAE has, and ends where it finds no weights
    cpu = torch.device("cpu")
    vae.first_stage_model, vae.device, vae.output_device, vae.vae_dtype = codec, cpu, cpu, torch.float32
    vae.patcher = comfy.model_patcher.ModelPatcher(codec, load_device=cpu, offload_device=cpu)
    vae.memory_used_encode = vae.memory_used_decode = lambda shape, dtype: 1
    return vae


def make_vae(shape: VaeShape) -> Any:
    vae = empty_vae(Codec(shape))
    vae.latent_channels = shape.channels
    vae.downscale_ratio = vae.upscale_ratio = shape.side
    if shape.is_video:
        vae.latent_dim, vae.not_video = 3, shape.takes_pictures
        vae.downscale_ratio = (shape.to_latents, shape.side, shape.side)
        vae.upscale_ratio = (shape.to_frames, shape.side, shape.side)
        vae.downscale_index_formula = vae.upscale_index_formula = (shape.frames, shape.side, shape.side)
    return vae


def make_sound_vae(shape: SoundShape) -> Any:
    vae = empty_vae(SoundCodec(shape))
    vae.latent_channels, vae.output_channels, vae.pad_channel_value = shape.channels, 2, "replicate"
    vae.process_input = vae.process_output = lambda audio: audio
    vae.audio_sample_rate = vae.audio_sample_rate_output = shape.rate
    vae.crop_input = False
    return vae
