"""The rendered set: drawn once, kept as bytes in the cache folder, mapped by each training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..demo_nodes.captions import Scene, conditioning
from .scenes import draw, scenes_by_chance
from .whole import whole

VERSION = 1  # of what is drawn: another one is another file
CHUNK = 256


@dataclass(frozen=True)
class PictureSet:
    """Pictures (N, 3, S, S) as bytes, with their scenes and caption tokens."""

    pictures: torch.Tensor
    scenes: list[Scene]
    tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.scenes)


def picture_set(
    folder: Path, count: int, side: int, seed: int = 0, progress: Callable[[int], None] = lambda done: None
) -> PictureSet:
    """Map the set of this size, drawn first where it is missing."""
    file = set_file(folder, count, side, seed)
    scenes = scenes_by_chance(seed, count)
    if not file.exists():
        write(file, scenes, side, seed, progress)
    mapped = torch.from_file(str(file), shared=True, size=count * 3 * side * side, dtype=torch.uint8)
    return PictureSet(
        mapped.view(count, 3, side, side), scenes, torch.stack([conditioning(scene) for scene in scenes])
    )


def set_file(folder: Path, count: int, side: int, seed: int = 0) -> Path:
    return folder / f"pictures-{VERSION}-{seed}-{side}-{count}.bytes"


def write(file: Path, scenes: list[Scene], side: int, seed: int, progress: Callable[[int], None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file) as part, part.open("wb") as out:
        for start in range(0, len(scenes), CHUNK):
            drawn = draw(scenes[start : start + CHUNK], seed + start, side)
            out.write((drawn * 255).round().to(torch.uint8).numpy().data)
            progress(start)
