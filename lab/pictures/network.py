"""The demo's diffusion transformer as a plain torch module, for training.

Its keys and its arithmetic are ComfyUI's, so that the weights load there; a test holds its forward
against the host's. ComfyUI's own cannot be trained: it adds in place to what a gradient needs.
Only what the demo's model has is here: no guidance, one resolution at a time.

Legend: B batch, L tokens, T text tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

PATCH = 2  # latent pixels a side of a token
AXES = (16, 56, 56)  # of the positions; ComfyUI reads no others from a file
TIME_CHANNELS = 256


@dataclass(frozen=True)
class Width:
    """Sizes of the network; a head is as wide as the position axes together."""

    latent: int = 16
    text: int = 19
    tokens: int = 3
    hidden: int = 256
    double_blocks: int = 2
    single_blocks: int = 4
    step: float = 1.0  # between the positions of neighbouring tokens

    @property
    def heads(self) -> int:
        return self.hidden // sum(AXES)


class Norm(nn.Module):
    """A root-mean-square norm with a learned scale."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight).type_as(x)


class TwoNorms(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.query_norm = Norm(width)
        self.key_norm = Norm(width)


class Embedder(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.in_layer = nn.Linear(width, hidden)
        self.out_layer = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(functional.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """Shift, scale and gate from the time and the caption; zero at first, so that a block begins as
    the identity.
    """

    def __init__(self, hidden: int, count: int):
        super().__init__()
        self.count = count
        self.lin = zeroed(nn.Linear(hidden, count * hidden))

    def forward(self, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.lin(functional.silu(vec)).unsqueeze(1).chunk(self.count, dim=-1)


class Attention(nn.Module):
    """The weights of a stream's attention; the streams attend together."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm = TwoNorms(hidden // heads)
        self.proj = nn.Linear(hidden, hidden)

    def queries_keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split_qkv(self.qkv(x), self.heads, self.norm)


class DoubleBlock(nn.Module):
    """Text and image with weights of their own, attending together."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(hidden, 6), Modulation(hidden, 6)
        self.img_attn, self.txt_attn = Attention(hidden, heads), Attention(hidden, heads)
        self.img_mlp, self.txt_mlp = mlp(hidden), mlp(hidden)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, vec: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        img_mod, txt_mod = self.img_mod(vec), self.txt_mod(vec)
        of_txt = self.txt_attn.queries_keys_values(modulated(txt, *txt_mod[:2]))
        of_img = self.img_attn.queries_keys_values(modulated(img, *img_mod[:2]))
        attended = attend([torch.cat(pair, dim=2) for pair in zip(of_txt, of_img, strict=True)], positions)
        txt_attended, img_attended = attended.split((txt.shape[1], img.shape[1]), dim=1)
        img = img + self.img_attn.proj(img_attended) * img_mod[2]
        img = img + self.img_mlp(modulated(img, *img_mod[3:5])) * img_mod[5]
        txt = txt + self.txt_attn.proj(txt_attended) * txt_mod[2]
        txt = txt + self.txt_mlp(modulated(txt, *txt_mod[3:5])) * txt_mod[5]
        return img, txt


class SingleBlock(nn.Module):
    """Text and image as one sequence; attention and MLP side by side."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.linear1 = nn.Linear(hidden, 7 * hidden)
        self.linear2 = nn.Linear(5 * hidden, hidden)
        self.norm = TwoNorms(hidden // heads)
        self.modulation = Modulation(hidden, 3)

    def forward(self, x: torch.Tensor, vec: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, wide = self.linear1(modulated(x, shift, scale)).split((3 * self.hidden, 4 * self.hidden), dim=-1)
        attended = attend(split_qkv(qkv, self.heads, self.norm), positions)
        return (
            x + self.linear2(torch.cat((attended, functional.gelu(wide, approximate="tanh")), dim=-1)) * gate
        )


class LastLayer(nn.Module):
    def __init__(self, hidden: int, channels: int):
        super().__init__()
        self.linear = zeroed(nn.Linear(hidden, channels))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), zeroed(nn.Linear(hidden, 2 * hidden)))

    def forward(self, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        return self.linear(modulated(x, *self.adaLN_modulation(vec).unsqueeze(1).chunk(2, dim=-1)))


class Network(nn.Module):
    """From a noisy latent, its time and a caption to the velocity: noise minus picture."""

    def __init__(self, width: Width):
        super().__init__()
        self.width = width
        channels = width.latent * PATCH * PATCH
        self.img_in = nn.Linear(channels, width.hidden)
        self.time_in = Embedder(TIME_CHANNELS, width.hidden)
        self.vector_in = Embedder(width.tokens * width.text, width.hidden)
        self.txt_in = nn.Linear(width.text, width.hidden)
        self.double_blocks = nn.ModuleList(
            [DoubleBlock(width.hidden, width.heads) for _ in range(width.double_blocks)]
        )
        self.single_blocks = nn.ModuleList(
            [SingleBlock(width.hidden, width.heads) for _ in range(width.single_blocks)]
        )
        self.final_layer = LastLayer(width.hidden, channels)

    def forward(self, latent: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w), (B,), (B, T, words) -> (B, C, h, w)."""
        height, width = (side // PATCH for side in latent.shape[-2:])
        positions = rotations(tokens.shape[1], height, width, self.width.step)
        img = self.img_in(to_tokens(latent))
        vec = self.time_in(waves(time)) + self.vector_in(tokens.flatten(1))
        txt = self.txt_in(tokens)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, positions)
        both = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            both = block(both, vec, positions)
        return to_latent(self.final_layer(both[:, txt.shape[1] :], vec), height, width)


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
    )


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def split_qkv(qkv: torch.Tensor, heads: int, norm: TwoNorms) -> tuple[torch.Tensor, ...]:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return norm.query_norm(q), norm.key_norm(k), v


def attend(qkv: Sequence[torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) each -> (B, L, H * D)."""
    q, k, v = qkv
    q, k = rotated(q, positions).to(v.dtype), rotated(k, positions).to(v.dtype)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbouring channels by its token's angle: positions (2, L, D / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = positions
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotations(text: int, height: int, width: int, step: float = 1.0) -> torch.Tensor:
    """Cosines and sines (2, L, D / 2) of all tokens: text stands at 0, images on a grid of this
    step.
    """
    ids = torch.zeros(text + height * width, len(AXES), dtype=torch.float64)
    ids[text:, 1] = (step * torch.arange(height)).repeat_interleave(width)
    ids[text:, 2] = (step * torch.arange(width)).repeat(height)
    angles = [
        ids[:, axis, None] / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        for axis, size in enumerate(AXES)
    ]
    turned = torch.cat(angles, dim=-1)
    return torch.stack((turned.cos(), turned.sin())).float()


def waves(time: torch.Tensor) -> torch.Tensor:
    half = TIME_CHANNELS // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
    angles = 1000 * time[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def to_tokens(latent: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = latent.shape
    cut = latent.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def to_latent(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    cut = tokens.view(tokens.shape[0], height, width, -1, PATCH, PATCH)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], -1, height * PATCH, width * PATCH)
