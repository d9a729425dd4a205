"""Text encoders in place of files: ComfyUI's own CLIP class around a tokenizer and a model that
draw a prompt's tokens from its words, so that prompts differ, and in length too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import comfy.sd
import torch

from .names import TextShape

MOST_WORDS = 15
LEAST = 5
PER_PICTURE = 4
WRITTEN = '{"prompt": "a picture in a few words", "caption": "a picture"}'  # what a language model answers
ENCODERS = ("l", "g", "t5xxl", "llama", "qwen25_7b", "mt5xl", "hydit_clip")


class WordTokenizer:
    """Makes one token per word, and a few for each picture that is part of a prompt."""

    def __init__(self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None):
        pass

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **given: Any
    ) -> dict[str, list]:
        pictures = [
            picture for name in ("images", "image", "image_embeds") for picture in listed(given.get(name))
        ]
        seen = [f"{float(picture.float().mean()):.4f}" for picture in pictures]
        words = [*text.split()[:MOST_WORDS], *(mean for mean in seen for _ in range(PER_PICTURE))]
        words += ["end"] * (LEAST - len(words))
        tokens = [(zlib.crc32(f"{number}/{word}".encode()) % 32000, 1.0) for number, word in enumerate(words)]
        return {name: [tokens] for name in ENCODERS}

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return WRITTEN

    def state_dict(self) -> dict[str, Any]:
        return {}


def listed(pictures: Any) -> list[torch.Tensor]:
    if pictures is None:
        return []
    return (
        [pictures]
        if isinstance(pictures, torch.Tensor)
        else [one for one in pictures if isinstance(one, torch.Tensor)]
    )


def encoder_class(shape: TextShape) -> type[torch.nn.Module]:
    class Encoder(torch.nn.Module):
        def __init__(self, **_: Any):
            super().__init__()
            self.dtypes = {torch.float32}
            self.nothing = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

        def reset_clip_options(self) -> None: ...

        def set_clip_options(self, options: Mapping[str, Any]) -> None: ...

        def generate(self, *_args: Any, **_options: Any) -> list[int]:
            return [0]

        def encode_token_weights(
            self, tokens: Mapping[str, list]
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            ids = [number for name in ENCODERS for number, _weight in tokens[name][0]]
            count = len(tokens[ENCODERS[0]][0])
            generator = torch.Generator().manual_seed(zlib.crc32(str(ids).encode()))

            def drawn(*shape: int) -> torch.Tensor:
                return torch.randn(shape, generator=generator)

            return drawn(1, count, shape.width), drawn(1, shape.pooled), shape.extras(count, drawn)

    return Encoder


def make_clip(shape: TextShape) -> Any:
    return comfy.sd.CLIP(SimpleNamespace(params={}, clip=encoder_class(shape), tokenizer=WordTokenizer))
