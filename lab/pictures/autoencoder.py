"""A small autoencoder with TAESD's keys, so that ComfyUI's VAE loader detects it.

The encoder is linear: the principal components of 8 x 8 pixels, written into TAESD's convolutions
exactly. So latents need no training before the transformer's can begin. The decoder is trained.

Legend: K latent channels, C colours, S a side in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

CELL = 8  # pixels a side of a latent pixel
CHANNELS = 16
WIDTH = 64  # TAESD's
SCALE, SHIFT = 0.3611, 0.1159  # the latent format's: the model's latent is (latent - SHIFT) * SCALE
SPREAD, SLOPE = 1.5, 0.4  # how wide components are in the latent: SPREAD * (deviation / largest) ** SLOPE
ENCODER_BLOCKS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13)
DOWN = (2, 6, 10)
DECODER_BLOCKS = (3, 4, 5, 8, 9, 10, 13, 14, 15, 18)
UP = (7, 12, 17)


@dataclass(frozen=True)
class Projection:
    """Pixels to latent: weight (K, C, 8, 8) and bias (K,), both exact in bfloat16."""

    weight: torch.Tensor
    bias: torch.Tensor
    kept: float = 1.0  # share of the variance

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """(B, C, S, S) in [0, 1] -> the model's latent (B, K, S / 8, S / 8)."""
        return functional.conv2d(pictures, self.weight, self.bias, stride=CELL)


def fit_projection(pictures: torch.Tensor) -> Projection:
    """Return the principal components of all 8 x 8 cells, scaled so that the large ones stay
    larger: whitened, edges would weigh as much as colours.
    """
    cells = functional.unfold(pictures, CELL, stride=CELL).transpose(1, 2).flatten(0, 1).double()
    mean = cells.mean(0)
    variances, vectors = torch.linalg.eigh((cells - mean).T @ (cells - mean) / len(cells))
    variances, vectors = variances.flip(0), vectors.flip(1)
    signs = vectors[vectors.abs().argmax(0), torch.arange(len(mean))].sign()
    deviations = variances[:CHANNELS].sqrt()
    spread = SPREAD * (deviations / deviations[0]) ** SLOPE
    weight = ((vectors * signs)[:, :CHANNELS] * (spread / deviations)).T
    bias = -(weight @ mean)
    kept = float(variances[:CHANNELS].sum() / variances.sum())
    return Projection(rounded(weight).view(CHANNELS, -1, CELL, CELL), rounded(bias), kept)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).float()


def encoder_weights(projection: Projection) -> dict[str, torch.Tensor]:
    """Write the projection as TAESD's encoder: cells are folded into channels in three steps, and
    the components pass the ReLU as a positive and a negative half. The last channel is always 1.
    """
    one = WIDTH - 1
    weights = {
        f"{index}.conv.{layer}.{name}": tensor
        for index in ENCODER_BLOCKS
        for layer, name, tensor in zeros_of_block()
    }
    weights["0.weight"], weights["0.bias"] = torch.zeros(WIDTH, 3, 3, 3), torch.zeros(WIDTH)
    weights["0.weight"][range(3), range(3), 1, 1] = 1.0
    weights["0.bias"][one] = 1.0
    weights |= {f"{index}.weight": torch.zeros(WIDTH, WIDTH, 3, 3) for index in DOWN}
    corners = [(row, column) for row in range(2) for column in range(2)]
    for step, index in enumerate(DOWN[:2]):
        channels = 3 * 4**step
        for corner, (row, column) in enumerate(corners):
            weights[f"{index}.weight"][
                range(corner * channels, (corner + 1) * channels), range(channels), 1 + row, 1 + column
            ] = 1.0
        weights[f"{index}.weight"][one, one, 1, 1] = 1.0
    # (K, C, y2 y1 y0, x2 x1 x0) -> (K, (y1, x1), (y0, x0), C) for each (y2, x2)
    cells = (
        projection.weight.view(CHANNELS, 3, 2, 2, 2, 2, 2, 2)
        .permute(2, 5, 0, 3, 6, 4, 7, 1)
        .reshape(2, 2, CHANNELS, 48)
    )
    last, half = weights[f"{DOWN[2]}.weight"], slice(CHANNELS, 2 * CHANNELS)
    for row, column in corners:
        last[:CHANNELS, :48, 1 + row, 1 + column] = cells[row, column]
    last[:CHANNELS, one, 1, 1] = projection.bias
    last[half] = -last[:CHANNELS]
    weights["14.weight"], weights["14.bias"] = torch.zeros(CHANNELS, WIDTH, 3, 3), torch.zeros(CHANNELS)
    weights["14.weight"][range(CHANNELS), range(CHANNELS), 1, 1] = 1.0
    weights["14.weight"][range(CHANNELS), range(CHANNELS, 2 * CHANNELS), 1, 1] = -1.0
    return {f"taesd_encoder.{name}": tensor for name, tensor in weights.items()}


def projection_of(weights: Mapping[str, torch.Tensor]) -> Projection:
    """Read back the projection that ``encoder_weights`` wrote."""
    last = weights[f"taesd_encoder.{DOWN[2]}.weight"][:CHANNELS].float()
    cells = torch.stack([last[:, :48, 1 + row, 1 + column] for row in range(2) for column in range(2)])
    # ((y2, x2), K, (y1, x1), (y0, x0), C) -> (K, C, y2 y1 y0, x2 x1 x0)
    weight = cells.view(2, 2, CHANNELS, 2, 2, 2, 2, 3).permute(2, 7, 0, 3, 5, 1, 4, 6)
    return Projection(weight.reshape(CHANNELS, 3, CELL, CELL).contiguous(), last[:, WIDTH - 1, 1, 1].clone())


def zeros_of_block() -> list[tuple[int, str, torch.Tensor]]:
    layers = ((layer, name) for layer in (0, 2, 4) for name in ("weight", "bias"))
    return [
        (layer, name, torch.zeros(WIDTH, WIDTH, 3, 3) if name == "weight" else torch.zeros(WIDTH))
        for layer, name in layers
    ]


def conv(before: int, after: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1, bias=bias)


class Soft(nn.Module):
    """Keeps latents within 3 of 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            conv(WIDTH, WIDTH), nn.ReLU(), conv(WIDTH, WIDTH), nn.ReLU(), conv(WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.conv(x) + x)


class Decoder(nn.Sequential):
    """TAESD's decoder, from the model's latent to pixels in [0, 1]."""

    def __init__(self):
        layers: dict[int, nn.Module] = {0: Soft(), 1: conv(CHANNELS, WIDTH), 2: nn.ReLU(), 19: conv(WIDTH, 3)}
        layers |= {index: Block() for index in DECODER_BLOCKS}
        layers |= {index - 1: nn.Upsample(scale_factor=2) for index in UP}
        layers |= {index: conv(WIDTH, WIDTH, bias=False) for index in UP}
        super().__init__(*(layers[index] for index in sorted(layers)))
