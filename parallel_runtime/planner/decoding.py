"""Predict how long decoding a video takes, after it was sampled: the VAE has one GPU, however many
the layout has.
"""

from __future__ import annotations

from math import prod

from ..families.sample import Extent
from .box import Device
from .published import device, figures


def decoding_s(model: str, extent: Extent, on: Device) -> float | None:
    """Return the seconds that a device takes to decode what a released model has sampled; None for
    a model whose decoder nobody has published a time of. They scale with products, which
    convolutions are, from the device that was timed.
    """
    known = figures()["decoders"].get(model)
    if known is None:
        return None
    overlap, tile = known["overlap"], known["tile"]
    voxels = prod(
        decoded(length, edge, overlap)
        for length, edge in zip(extent, (tile[0], tile[0], tile[1]), strict=True)
    )
    return voxels / known["voxels_per_s"] * device(known["device"]).matmul_flops_per_s / on.matmul_flops_per_s


def decoded(length: int, tile: int, overlap: float) -> int:
    """Return how many pixels or frames are decoded along one axis by tiles that overlap: the last
    ones are shorter.
    """
    return sum(min(tile, length - start) for start in range(0, length, round(tile * (1 - overlap))))
