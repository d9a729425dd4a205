"""How far pictures are from others: one by one, and as sets.

Legend: B pictures, C colours, S a side, F features. Pictures are in [0, 1].
"""

from __future__ import annotations

import torch
from torch.nn import functional

WINDOW = 7  # pixels a side


def psnr(pictures: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """(B, C, S, S) each -> decibels (B,); infinite where nothing differs."""
    return -10 * (pictures - of).square().flatten(1).mean(1).log10()


def ssim(pictures: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Structural similarity (B,) over windows of 7 x 7 pixels, equally weighted, of each colour."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(x, WINDOW, 1)

    x, y = pictures.double(), of.double()
    mean_x, mean_y = mean(x), mean(y)
    spread_x, spread_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both = mean(x * y) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + 0.01**2) * (2 * both + 0.03**2)
    return (alike / ((mean_x**2 + mean_y**2 + 0.01**2) * (spread_x + spread_y + 0.03**2))).flatten(1).mean(1)


def kernel_distance(features: torch.Tensor, of: torch.Tensor) -> float:
    """The squared maximum mean discrepancy of two sets (B, F) under the cubic kernel of KID,
    without bias: 0 on average where both come from one distribution.
    """
    x, y = features.double(), of.double()
    width = x.shape[1]

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b.T / width + 1) ** 3

    def among(a: torch.Tensor) -> torch.Tensor:
        pairs = kernel(a, a)
        return (pairs.sum() - pairs.diagonal().sum()) / (len(a) * (len(a) - 1))

    return float(among(x) + among(y) - 2 * kernel(x, y).mean())
