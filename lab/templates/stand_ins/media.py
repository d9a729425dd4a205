"""Pictures, videos and sounds in place of files, and what looks at them: drawn by the file's name,
small as the cut sizes are.
"""

from __future__ import annotations

import zlib
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from ..cut import FPS, FRAMES, LASTS, SIDES, seconds

RATE = 44100
SEEN_TOKENS, SEEN_LAYERS = 9, 27


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def pictures(name: str, count: int = 1) -> torch.Tensor:
    """Draw colours (count, H, W, 3), half of them smooth and half in squares, so that there are
    edges; they move where there are several pictures.
    """
    coarse = torch.rand(1, 3, 2 + count // 4, 6, 8, generator=generator_of(name))
    smooth = functional.interpolate(coarse, size=(count, *SIDES), mode="trilinear")
    squares = functional.interpolate(coarse.flip(-1), size=(count, *SIDES), mode="nearest")
    return (smooth + squares)[0].movedim(0, -1).div(2).clamp(0, 1)


def picture(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture, and a mask of its middle."""
    mask = torch.zeros(1, *SIDES)
    mask[:, SIDES[0] // 4 : -SIDES[0] // 4, SIDES[1] // 4 : -SIDES[1] // 4] = 1
    return pictures(name), mask


def frames_of(name: str) -> int:
    """How many frames a file is to stand for."""
    return int(name.rpartition(LASTS)[2]) if LASTS in name else FRAMES


def sound(name: str) -> dict[str, Any]:
    samples = round(seconds(frames_of(name)) * RATE)
    return {
        "waveform": 0.1 * torch.randn(1, 2, samples, generator=generator_of(name)),
        "sample_rate": RATE,
    }


def video(name: str) -> Any:
    from comfy_api.latest import InputImpl, Types

    components = Types.VideoComponents(
        images=pictures(name, frames_of(name)), audio=sound(name), frame_rate=Fraction(FPS)
    )
    return InputImpl.VideoFromComponents(components)


class Sight:
    """A CLIP vision model: tokens of ``width`` drawn from a picture's colours."""

    def __init__(self, width: int):
        self.width = width

    def encode_image(self, image: torch.Tensor, crop: Any = True) -> Any:
        generator = torch.Generator().manual_seed(round(float(image.mean()) * 1e6))
        layers = torch.randn(image.shape[0], SEEN_LAYERS, SEEN_TOKENS, self.width, generator=generator)
        return SimpleNamespace(
            last_hidden_state=layers[:, -1],
            penultimate_hidden_states=layers[:, -2],
            all_hidden_states=layers,
            image_embeds=layers[:, -1, 0],
            image_sizes=[(3, 16, 16 * SEEN_TOKENS)] * image.shape[0],
            mm_projected=None,
        )


class Hearing:
    """An audio encoder: ``layers`` of (1, T, width), fifty a second."""

    def __init__(self, layers: int, width: int):
        self.layers, self.width = layers, width

    def encode_audio(self, waveform: torch.Tensor, sample_rate: int) -> dict[str, Any]:
        samples = round(waveform.shape[-1] / sample_rate * 16000)
        generator = torch.Generator().manual_seed(round(float(waveform.abs().mean()) * 1e6))
        layers = list(torch.randn(self.layers, 1, samples // 320, self.width, generator=generator))
        return {"encoded_audio": layers[-1], "encoded_audio_all_layers": layers, "audio_samples": samples}
