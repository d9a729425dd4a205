"""Measure how far pictures of the trained model are, as a set, from drawn ones: stock's,
PipeFusion's at its default, and stock's under other seeds, which says how much is noise.

The distance is KID's, the squared maximum mean discrepancy without bias under the kernel
(x . y / F + 1)^3, on the F latents of the demo's autoencoder, not on Inception's features: its
figures compare with each other only. All pictures are one block. The drawn ones have captions of
their own, as two sets of the same captions would be nearer than two sets by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from ..pictures.measures import kernel_distance
from ..pictures.scenes import draw, scenes_by_chance
from .figures import Figure, Goal, Options, exactly
from .quality import DEFAULT, Cell, Pictures

PROMPTS, FEW = 1000, 256  # captions; of the first distances
DRAWN, AT_ONCE, DRAWN_SEED = 4096, 256, 4242
LEAST, LEAST_STEPS = 2, 4  # captions, and pictures drawn, of the smallest case; steps of its pictures
WITHIN = 0.05
STOCK = DEFAULT.stock
CELLS = (STOCK, DEFAULT, replace(STOCK, seed=1))


def bench(options: Options) -> Iterator[Figure]:
    """The distances of few pictures come first; goals are of all."""
    prompts, count = options.choose((PROMPTS, DRAWN), (LEAST, LEAST))
    pictures = Pictures(options.prompts or prompts, options.pictures, options)
    scenes = pictures.scenes
    others = scenes_by_chance(DRAWN_SEED, count)
    parts = (draw(others[start : start + AT_ONCE], DRAWN_SEED + start) for start in range(0, count, AT_ONCE))
    drawn = torch.cat([pictures.features(part) for part in parts])
    sampled = options.choose(CELLS, tuple(replace(cell, steps=LEAST_STEPS) for cell in CELLS))
    features = {cell: drawn[:0] for cell in sampled}
    for before, count in pairwise((0, *(few for few in (FEW,) if few < len(scenes)), len(scenes))):
        distances: dict[Cell, float] = {}
        for cell in sampled:
            features[cell] = torch.cat((features[cell], pictures.features(pictures.of(cell, count)[before:])))
            distances[cell] = kernel_distance(features[cell], drawn)
            is_held = cell == DEFAULT and count == len(scenes)
            goal = Goal.within(WITHIN, distances[STOCK]) if is_held else None
            yield Figure("distribution", f"{cell} n={count}", "distance", exactly(distances[cell]), "", goal)
