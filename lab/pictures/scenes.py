"""Scenes by chance, and how they are drawn: anti-aliased shapes by their signed distance, many
pictures at once.

Legend: B pictures, S a side in pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from ..demo_nodes.captions import COLOURS, GROUNDS, OBJECTS, PLACES, SHAPES, Scene, Thing

SIDE = 128  # pixels for which the lengths below are given
LARGER_SIDE = 512  # of the larger model's pictures, whose tokens stand at a quarter of the step
RGB = {
    "red": (222, 48, 48),
    "green": (52, 178, 76),
    "blue": (48, 84, 220),
    "yellow": (244, 208, 48),
    "purple": (158, 60, 196),
    "white": (250, 250, 250),
}
CENTRES = {
    "top left": (34, 34),
    "top right": (94, 34),
    "bottom left": (34, 94),
    "bottom right": (94, 94),
    "centre": (64, 64),
}
RADIUS, RADIUS_CHANGE, SHIFT = 25.0, 2.0, 3.0
CORNERS = 4  # the first places; two objects stand in corners only
STRIPE = 16
LIGHT, DARK = (172, 170, 164), (52, 56, 66)


def scene_by_chance(chance: random.Random) -> Scene:
    pair = chance.random() < 0.5
    places = sorted(chance.sample(range(CORNERS), OBJECTS)) if pair else [chance.randrange(len(PLACES))]
    things = (Thing(chance.randrange(len(COLOURS)), chance.randrange(len(SHAPES)), place) for place in places)
    return Scene(tuple(things), chance.randrange(len(GROUNDS)))


def scenes_by_chance(seed: int, count: int) -> list[Scene]:
    chance = random.Random(seed)
    return [scene_by_chance(chance) for _ in range(count)]


def draw(scenes: Sequence[Scene], seed: int, side: int = SIDE) -> torch.Tensor:
    """Draw scenes as (B, 3, S, S) in [0, 1]. The seed shifts and stretches each object a little, so
    that a caption has many pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    line = (torch.arange(side) + 0.5) * (SIDE / side)
    y, x = line.view(1, side, 1), line.view(1, 1, side)
    pictures = grounds(torch.tensor([scene.ground for scene in scenes]), y, x)
    rgb = torch.tensor([RGB[name] for name in COLOURS]) / 255
    centres = torch.tensor([CENTRES[name] for name in PLACES], dtype=torch.float32)
    pixel = SIDE / side
    for index in range(OBJECTS):
        jitter = torch.rand(len(scenes), 3, generator=generator) * 2 - 1
        drawn = [number for number, scene in enumerate(scenes) if index < len(scene.things)]
        if not drawn:
            continue
        things = [scenes[number].things[index] for number in drawn]
        centre = centres[[thing.place for thing in things]] + jitter[drawn, :2] * SHIFT
        radius = (RADIUS + jitter[drawn, 2] * RADIUS_CHANGE).view(-1, 1, 1)
        inside_px = -distances(
            torch.tensor([thing.shape for thing in things]),
            x - centre[:, 0].view(-1, 1, 1),
            y - centre[:, 1].view(-1, 1, 1),
            radius,
        )
        cover = (inside_px / pixel + 0.5).clamp(0, 1).unsqueeze(1)
        colour = rgb[[thing.colour for thing in things]].view(-1, 3, 1, 1)
        pictures[drawn] += (colour - pictures[drawn]) * cover
    return pictures


def grounds(kinds: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    light, dark = (torch.tensor(tone).view(1, 3, 1, 1) / 255 for tone in (LIGHT, DARK))
    side = y.shape[1]
    plain = torch.zeros(1, side, side)
    shares = {
        "light": plain,
        "dark": plain + 1,
        "shaded": y / SIDE + plain,
        "striped": (y // (STRIPE / 2) % 2) * 0.6 + plain,
    }
    share = torch.cat([shares[name] for name in GROUNDS])[kinds].unsqueeze(1)
    return light + (dark - light) * share


def distances(shapes: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return the distance of each pixel to the edge of each shape, negative inside."""
    made = {"circle": circle, "square": square, "triangle": triangle, "ring": ring}
    out = torch.empty(len(shapes), y.shape[1], x.shape[2])
    for index, name in enumerate(SHAPES):
        rows = shapes == index
        out[rows] = made[name](x[rows], y[rows], radius[rows])
    return out


def circle(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - radius


def square(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - radius * 0.92


def triangle(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """An upright one: half as wide as it is high on either side of its axis."""
    slope = 0.5
    sides = (x.abs() - (y + radius) * slope) / math.hypot(1, slope)
    return torch.maximum(sides, y - radius)


def ring(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    thick = 0.24
    return (torch.hypot(x, y) - radius * (1 - thick)).abs() - radius * thick
