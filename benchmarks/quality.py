"""Measure what PipeFusion's staleness does to the pictures of the trained model: how far they are
from stock's of the same captions and seeds, and how many words of a caption they show.

Everything is sampled by ComfyUI's own samplers on the single-process reference: stages cannot
change a result. Legend of a cell: patches, warm-up evaluations, steps, sampler.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..launcher.demo_nodes.captions import conditioning
from ..launcher.pictures.files import ASSETS, MODEL, VAE
from ..launcher.pictures.scenes import scenes_by_chance
from .figures import Figure, Goal, Options, estimate, exactly

PATCHES, WARM_UPS, STEPS = (2, 4, 8), (1, 2, 4), (4, 8, 20, 28)
SAMPLERS = ("euler", "dpmpp_2m", "heun", "dpmpp_2m_sde")
CFG, SCHEDULER = 3.0, "simple"
SCENES_SEED, BATCH, LATENT = 777, 16, (16, 16, 16)
CLASSIFIED_SET, SET_SEED = 2048, 555
LEAST_PSNR = 25.0  # at 4 patches, 2 warm-up evaluations and 28 steps of euler


@dataclass(frozen=True)
class Cell:
    """``patches`` of 1 is stock."""

    patches: int
    warm_up: int
    steps: int
    sampler: str

    def __str__(self) -> str:
        if self.patches == 1:
            return f"stock steps={self.steps} {self.sampler}"
        return f"patches={self.patches} warm-up={self.warm_up} steps={self.steps} {self.sampler}"


def cells(only: Sequence[str]) -> Iterator[Cell]:
    """Return the product, or those that have all words of ``only``, such as ``patches=4``."""
    for sampler, steps, patches, warm_up in itertools.product(SAMPLERS, STEPS, PATCHES, WARM_UPS):
        cell = Cell(patches, warm_up, steps, sampler)
        if set(only) <= set(str(cell).split()) and warm_up < steps:
            yield cell


class Pictures:
    """The trained model in this process, and what it has sampled; kept in ``folder`` between
    runs of the bench.
    """

    def __init__(self, prompts: int, folder: Path | None):
        import comfy.sd
        import comfy.utils

        self.scenes = scenes_by_chance(SCENES_SEED, prompts)
        self._folder = folder
        weights, metadata = comfy.utils.load_torch_file(str(ASSETS / VAE), return_metadata=True)
        self._vae = comfy.sd.VAE(sd=weights, metadata=metadata)
        self._loaded: dict[tuple[int, int], Any] = {}

    @cached_property
    def _weights(self) -> str:
        return hashlib.sha256((ASSETS / MODEL).read_bytes() + (ASSETS / VAE).read_bytes()).hexdigest()[:12]

    def of(self, cell: Cell) -> Any:
        """Sample every caption; (B, 3, S, S) in [0, 1]."""
        import torch

        name = "-".join(map(str, (self._weights, len(self.scenes), *asdict(cell).values())))
        file = self._folder / f"{name}.pt" if self._folder else None
        if file is not None and file.exists():
            return torch.load(file, weights_only=True).float() / 255
        parts = [self._sample(cell, start) for start in range(0, len(self.scenes), BATCH)]
        pictures = (torch.cat(parts) * 255).round().to(torch.uint8)
        if file is not None:
            torch.save(pictures, file)
        return pictures.float() / 255

    def _sample(self, cell: Cell, start: int) -> Any:
        import comfy.sample
        import torch

        scenes = self.scenes[start : start + BATCH]
        tokens = torch.stack([conditioning(scene) for scene in scenes])
        positive, negative = ([[each, {"pooled_output": each.flatten(1)}]] for each in (tokens, torch.zeros_like(tokens)))
        noise = torch.randn(len(scenes), *LATENT, generator=torch.Generator().manual_seed(start))
        empty = torch.zeros_like(noise)
        how = (cell.steps, CFG, cell.sampler, SCHEDULER, positive, negative, empty)
        with torch.inference_mode():
            latent = comfy.sample.sample(self._model(cell), noise, *how, disable_pbar=True, seed=start)
            return self._vae.decode(latent).movedim(-1, 1).clamp(0, 1).clone()

    def _model(self, cell: Cell) -> Any:
        import comfy.sd

        from ..parallel_runtime.client.in_process import reference

        key = (cell.patches, cell.warm_up if cell.patches > 1 else 0)
        if key not in self._loaded:
            model = comfy.sd.load_diffusion_model(str(ASSETS / MODEL))
            self._loaded[key] = model if cell.patches == 1 else reference(model, cell.patches, cell.warm_up)
        return self._loaded[key]


def bench(options: Options) -> Iterator[Figure]:
    from ..launcher.pictures.classifier import accuracy
    from ..launcher.pictures.measures import psnr, ssim

    pictures = Pictures(options.prompts, options.pictures)
    classifier = trained_classifier()
    told: set[Cell] = set()
    for cell in cells(options.only):
        stock_cell = Cell(1, 0, cell.steps, cell.sampler)
        stock, ours = pictures.of(stock_cell), pictures.of(cell)
        decibels = [min(value, 99.0) for value in psnr(ours, stock).tolist()]
        at_goal = (cell.patches, cell.warm_up, cell.steps, cell.sampler) == (4, 2, 28, "euler")
        yield Figure("quality", str(cell), "psnr", estimate(decibels, mean), "dB", Goal(at_least=LEAST_PSNR) if at_goal else None)
        yield Figure("quality", str(cell), "ssim", estimate(ssim(ours, stock).tolist(), mean), "")
        for each, sampled in ((stock_cell, stock), (cell, ours)):
            if each not in told:
                told.add(each)
                for words, share in accuracy(classifier, sampled, pictures.scenes).items():
                    yield Figure("quality", str(each), f"{words} right", exactly(share), "")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def trained_classifier() -> Any:
    """Train it on pictures drawn anew, the same ones each time."""
    import torch

    from ..launcher.pictures.classifier import train_classifier
    from ..launcher.pictures.scenes import draw

    scenes = scenes_by_chance(SET_SEED, CLASSIFIED_SET)
    drawn = [(draw(scenes[start : start + 256], SET_SEED + start) * 255).to(torch.uint8) for start in range(0, len(scenes), 256)]
    return train_classifier(torch.cat(drawn), scenes)
