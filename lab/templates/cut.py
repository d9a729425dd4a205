"""The one rule by which every template's sizes and steps become small. Pure.

An input is cut by its name, whatever node has it. A value that another node computes is cut on its
way, by a node in between. Cutting a size twice changes nothing, so that sizes of pictures that are
small already, and what is computed of them, stay equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Graph = dict[str, dict[str, Any]]

WIDE, SIDES, FRAMES = 800, (128, 192), 17
CUT_NODE, RECORD_NODE, ROUNDED_NODE = (
    "PipeMeshTemplateCut",
    "PipeMeshTemplateRecord",
    "PipeMeshTemplateRounded",
)


def cut_side(value: float) -> int:
    """Pixels along an edge: landscapes stay landscapes."""
    return int(value) if value <= SIDES[1] else SIDES[value >= WIDE]


def cut_picture(height: int, width: int) -> tuple[int, int]:
    """A picture that a node made large; one that grew out of small latents stays."""
    return (cut_side(height), cut_side(width)) if max(height, width) >= WIDE else (height, width)


def cut_pixels(value: float) -> float:
    """Millions of pixels of a picture."""
    return min(value, SIDES[0] * SIDES[1] / 1e6)


def cut_frames(value: float) -> int:
    """Frames of a video; one more than a multiple of 4 and of 8, as causal VAEs take them."""
    return min(int(value), FRAMES)


def cut_seconds(value: float) -> float:
    return min(value, 1.0)


def cut_steps(value: float) -> int:
    """Half as many steps are one less, so that a schedule in two parts keeps both."""
    return int(value) if value <= 2 else 1 + round(math.log2(value))


KINDS: Mapping[str, Callable[[float], float]] = {
    "side": cut_side,
    "pixels": cut_pixels,
    "frames": cut_frames,
    "seconds": cut_seconds,
    "steps": cut_steps,
}
NAMES: Mapping[str, re.Pattern[str]] = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "side": (
            r"((target|latent|max|ref_max)_)?(width|height|size)|(longer|shorter|largest)_(size|edge)|resolution"
        ),
        "pixels": r"megapixels",
        "frames": r"length|frames_number|(video|num)_frames|segment_length|amount",
        "seconds": r"duration(_seconds)?",
        "steps": r"steps|step|(start|end)_at_step",
    }.items()
}


def kind_of(name: str) -> str:
    """How an input of that name is cut; empty where it is not. Of ``resize_type.width`` the last
    part counts.
    """
    last = name.rpartition(".")[2]
    return next((kind for kind, pattern in NAMES.items() if pattern.fullmatch(last)), "")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def cut(graph: Graph, takes_number: Callable[[str, str], bool], least: Callable[[str, str], float]) -> Graph:
    """Returns the graph with small sizes and few steps. Of a node class and an input,
    ``takes_number`` says whether it is a number's, for linked ones, and ``least`` the smallest that
    it takes.
    """
    made: Graph = {}
    for key, node in graph.items():
        inputs = {}
        for name, value in node["inputs"].items():
            kind = kind_of(name)
            if kind and is_number(value):
                value = max(KINDS[kind](value), least(node["class_type"], name))
            elif kind and is_link(value) and takes_number(node["class_type"], name):
                between = f"{value[0]}:{value[1]}:{kind}"
                made[between] = {"class_type": CUT_NODE, "inputs": {"value": value, "kind": kind}}
                value = [between, 0]
            inputs[name] = value
        made[key] = {**node, "inputs": inputs}
    return made
