"""Measure how far pictures of the trained model are, as a set, from drawn ones of the same
captions:
stock's, PipeFusion's at its default, and stock's under other seeds, which is the noise between two
such sets.

The distance is KID's kernel on the latents of the demo's autoencoder, not on Inception's features:
its figures compare with each other only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .figures import Figure, Goal, Options, exactly
from .quality import DEFAULT, Pictures

PROMPTS = 1000
DRAWN_SEED = 4242
WITHIN = 0.05


def bench(options: Options) -> Iterator[Figure]:
    import torch

    from ..launcher.pictures.measures import kernel_distance
    from ..launcher.pictures.scenes import draw

    pictures = Pictures(options.prompts or PROMPTS, options.pictures, options.host)
    scenes = pictures.scenes
    drawn = pictures.features(torch.cat([draw(scenes[start : start + 250], DRAWN_SEED + start) for start in range(0, len(scenes), 250)]))
    of_stock = kernel_distance(pictures.features(pictures.of(DEFAULT.stock)), drawn)
    yield Figure("distribution", str(DEFAULT.stock), "distance", exactly(of_stock), "")
    ours = kernel_distance(pictures.features(pictures.of(DEFAULT)), drawn)
    yield Figure("distribution", str(DEFAULT), "distance", exactly(ours), "", Goal.within(WITHIN, of_stock))
    other = replace(DEFAULT.stock, seed=1)
    yield Figure("distribution", str(other), "distance", exactly(kernel_distance(pictures.features(pictures.of(other)), drawn)), "")
