"""Captions of the picture set: how they read, and the conditioning that they become.

A caption names up to two objects and the ground: "a red circle at the top left and a blue square at
the bottom right on a striped ground". Each phrase is one token: the sum of the one-hots of its
words. So no text encoder is needed, and the words' embedding is the model's own first layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "ring")
PLACES = ("top left", "top right", "bottom left", "bottom right", "centre")
GROUNDS = ("light", "dark", "shaded", "striped")
WORDS = (*COLOURS, *SHAPES, *PLACES, *GROUNDS)
OBJECTS = 2
TOKENS = OBJECTS + 1
PHRASE = re.compile(r"an? (?P<colour>\w+) (?P<shape>\w+) (?:at|in) the (?P<place>\w+(?: \w+)?)")
GROUND = re.compile(r" on an? (\w+) ground$")


@dataclass(frozen=True)
class Thing:
    """One object: indices of its words."""

    colour: int
    shape: int
    place: int

    def __str__(self) -> str:
        return f"a {COLOURS[self.colour]} {SHAPES[self.shape]} at the {PLACES[self.place]}"

    @property
    def words(self) -> Iterator[str]:
        yield from (COLOURS[self.colour], SHAPES[self.shape], PLACES[self.place])


@dataclass(frozen=True)
class Scene:
    """What a caption says: one or two objects, in the order of their places, and the ground."""

    things: tuple[Thing, ...]
    ground: int

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.things))} on a {GROUNDS[self.ground]} ground"


def parse_caption(caption: str) -> Scene:
    """Raises ValueError with a sentence that names the words it does not know."""
    text = " ".join(caption.lower().split()).rstrip(".")
    ground = GROUND.search(text)
    if ground is None:
        raise ValueError(f'"{caption}" ends in no ground: say, for example, "{example()}"')
    phrases = text[: ground.start()].split(" and ")
    if not 1 <= len(phrases) <= OBJECTS:
        raise ValueError(f'"{caption}" has {len(phrases)} objects: name 1 to {OBJECTS}')
    things = sorted((parse_phrase(phrase) for phrase in phrases), key=lambda thing: thing.place)
    if len({thing.place for thing in things}) < len(things):
        raise ValueError(f'"{caption}" has two objects at one place')
    return Scene(tuple(things), index_of(ground[1], GROUNDS, "ground"))


def parse_phrase(phrase: str) -> Thing:
    found = PHRASE.fullmatch(phrase)
    if found is None:
        raise ValueError(f'"{phrase}" names no object: say, for example, "{Thing(0, 0, 0)}"')
    known = {"colour": COLOURS, "shape": SHAPES, "place": PLACES}
    return Thing(**{name: index_of(found[name], words, name) for name, words in known.items()})


def index_of(word: str, words: tuple[str, ...], name: str) -> int:
    if word not in words:
        raise ValueError(f'"{word}" is no {name} of the picture set: choose {", ".join(words)}')
    return words.index(word)


def example() -> str:
    return str(Scene((Thing(0, 0, 0), Thing(2, 1, 3)), 0))


def conditioning(scene: Scene | None) -> torch.Tensor:
    """Return the tokens (TOKENS, words) of a caption, zeros where there is none. The pooled vector
    is these tokens one after another.
    """
    tokens = torch.zeros(TOKENS, len(WORDS))
    if scene is not None:
        for row, thing in enumerate(scene.things):
            for word in thing.words:
                tokens[row, WORDS.index(word)] = 1.0
        tokens[OBJECTS, WORDS.index(GROUNDS[scene.ground])] = 1.0
    return tokens
