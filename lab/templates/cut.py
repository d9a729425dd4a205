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

WIDE, SIDES, FRAMES, FPS = 800, (128, 192), 17, 16
CUT_NODE, RECORD_NODE, ROUNDED_NODE, HELD_NODE = (
    "PipeMeshTemplateCut",
    "PipeMeshTemplateRecord",
    "PipeMeshTemplateRounded",
    "PipeMeshTemplateHeld",
)
# Inputs that seek a frame of what is given; such and others that place something at a frame
SOUGHT = re.compile(r"(video|start)_frame_(offset|index)")
POINTS = re.compile(rf"{SOUGHT.pattern}|frame_(idx|index)(_\d+)?")
GIVEN = {"LoadVideo": "file", "LoadAudio": "audio"}
LASTS = "?frames="  # behind a file's name: of how many frames its stand-in is


def cut_side(value: float) -> int:
    """Pixels along an edge: landscapes stay landscapes."""
    return int(value) if value <= SIDES[1] else SIDES[value >= WIDE]


def cut_picture(height: int, width: int) -> tuple[int, int]:
    """A picture that a node made large; one that grew out of small latents stays."""
    return (cut_side(height), cut_side(width)) if max(height, width) >= WIDE else (height, width)


def cut_pixels(value: float) -> float:
    """Millions of pixels of a picture."""
    return min(value, SIDES[0] * SIDES[1] / 1e6)


def cut_frames(value: float, frames: int = FRAMES) -> int:
    """Frames of a video; one more than a multiple of 4 and of 8, as causal VAEs take them."""
    return min(int(value), frames)


def seconds(frames: int) -> float:
    """How long a sound beside so many frames is."""
    return max(1.0, frames / FPS)


def cut_seconds(value: float, frames: int = FRAMES) -> float:
    return min(value, seconds(frames))


def cut_point(value: float, frames: int = FRAMES) -> int:
    """A frame of a video that is cut: its last one stays its last."""
    return min(int(value), frames - 1)


def cut_steps(value: float) -> int:
    """Half as many steps are one less, so that a schedule in two parts keeps both."""
    return int(value) if value <= 2 else 1 + round(math.log2(value))


KINDS: Mapping[str, Callable[[float, int], float]] = {
    "side": lambda value, _frames: cut_side(value),
    "pixels": lambda value, _frames: cut_pixels(value),
    "frames": cut_frames,
    "seconds": cut_seconds,
    "point": cut_point,
    "steps": lambda value, _frames: cut_steps(value),
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
        "point": POINTS.pattern,
        "steps": r"steps|step|(start|end)_at_step",
    }.items()
}


def kind_of(name: str) -> str:
    """How an input of that name is cut; empty where it is not. Of ``resize_type.width`` the last
    part counts.
    """
    last = name.rpartition(".")[2]
    return next((kind for kind, pattern in NAMES.items() if pattern.fullmatch(last)), "")


def frames_of(graph: Graph, points: re.Pattern[str]) -> int:
    """How many frames a graph's videos need: one more small video behind the last frame that a
    number under such a name points at, from the end where it is negative.
    """
    pointed = [
        abs(int(value))
        for node in graph.values()
        for name, value in node["inputs"].items()
        if is_number(value) and points.fullmatch(name.rpartition(".")[2])
    ]
    last = max(pointed, default=0)
    return FRAMES if last < FRAMES else FRAMES + 8 * math.ceil(last / 8)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def cut(graph: Graph, takes_number: Callable[[str, str], bool], least: Callable[[str, str], float]) -> Graph:
    """Returns the graph with small sizes and few steps. Of a node class and an input,
    ``takes_number`` says whether it is a number's, for linked ones, and ``least`` the smallest that
    it takes. No video gets shorter than what the graph's inputs point at.
    """
    made: Graph = {}
    frames, given = frames_of(graph, POINTS), frames_of(graph, SOUGHT)
    for key, node in graph.items():
        inputs = {}
        for name, value in node["inputs"].items():
            kind = kind_of(name)
            if kind and is_number(value):
                value = max(KINDS[kind](value, frames), least(node["class_type"], name))
            elif kind and is_link(value) and takes_number(node["class_type"], name):
                between = f"{value[0]}:{value[1]}:{kind}"
                made[between] = {
                    "class_type": CUT_NODE,
                    "inputs": {"value": value, "kind": kind, "frames": frames},
                }
                value = [between, 0]
            elif given > FRAMES and name == GIVEN.get(node["class_type"]) and isinstance(value, str):
                value = f"{value}{LASTS}{given}"
            inputs[name] = value
        made[key] = {**node, "inputs": inputs}
    return made
