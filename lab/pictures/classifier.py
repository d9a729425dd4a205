"""Reads from a picture what is drawn where: a small convolutional net, trained on the set in a
minute, to count how many words of a caption a sample has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from ..demo_nodes.captions import COLOURS, PLACES, SHAPES, Scene

NOTHING = -100  # cross_entropy leaves it out
SIDE = 64
ANSWERS = 1 + len(COLOURS) + len(SHAPES)  # of each place: is something there, its colour, its shape


class Classifier(nn.Module):
    """(B, 3, S, S) in [0, 1] -> answers (B, places, 1 + colours + shapes)."""

    def __init__(self, width: int = 48):
        super().__init__()
        sizes = (3, width, 2 * width, 2 * width)
        layers = [
            layer
            for before, after in pairwise(sizes)
            for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(2 * width * (SIDE // 8) ** 2, len(PLACES) * ANSWERS)
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        small = functional.interpolate(pictures, (SIDE, SIDE), mode="area")
        return self.layers(small - 0.5).view(-1, len(PLACES), ANSWERS)


def targets(scenes: Sequence[Scene]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each scene and place whether something is there, its colour and its shape."""
    there = torch.zeros(len(scenes), len(PLACES))
    colours = torch.full((len(scenes), len(PLACES)), NOTHING)
    shapes = colours.clone()
    for row, scene in enumerate(scenes):
        for thing in scene.things:
            there[row, thing.place], colours[row, thing.place], shapes[row, thing.place] = (
                1,
                thing.colour,
                thing.shape,
            )
    return there, colours, shapes


def train_classifier(
    pictures: torch.Tensor, scenes: Sequence[Scene], steps: int = 400, batch: int = 32, seed: int = 0
) -> Classifier:
    """``pictures`` (N, 3, S, S) as bytes."""
    torch.manual_seed(seed)
    net, known = Classifier(), targets(scenes)
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3)
    for step in range(steps):
        chosen = torch.randint(len(scenes), (batch,))
        shown = pictures[chosen].float() / 255
        shown = shown + torch.randn_like(shown) * torch.rand(batch, 1, 1, 1) * 0.1
        loss = loss_of(net(shown), *(each[chosen] for each in known))
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
        optimiser.step()
    return net.eval()


def loss_of(
    answers: torch.Tensor, there: torch.Tensor, colours: torch.Tensor, shapes: torch.Tensor
) -> torch.Tensor:
    is_there, colour, shape = answers.split((1, len(COLOURS), len(SHAPES)), dim=-1)
    loss = functional.binary_cross_entropy_with_logits(is_there[..., 0], there)
    loss = loss + functional.cross_entropy(colour.flatten(0, 1), colours.flatten(), ignore_index=NOTHING)
    return loss + functional.cross_entropy(shape.flatten(0, 1), shapes.flatten(), ignore_index=NOTHING)


@torch.no_grad()
def accuracy(net: Classifier, pictures: torch.Tensor, scenes: Sequence[Scene]) -> dict[str, float]:
    """The share of words of captions that are drawn: places (right where nothing is, too), colours
    and shapes of the objects, and the mean of the three.
    """
    there, colours, shapes = targets(scenes)
    answers = torch.cat([net(part) for part in pictures.split(64)])
    is_there, colour, shape = answers.split((1, len(COLOURS), len(SHAPES)), dim=-1)
    objects = there > 0
    found = {
        "place": float(((is_there[..., 0] > 0) == objects).float().mean()),
        "colour": float((colour.argmax(-1) == colours)[objects].float().mean()),
        "shape": float((shape.argmax(-1) == shapes)[objects].float().mean()),
    }
    return {**found, "all": sum(found.values()) / len(found)}
