"""Measure what PipeFusion's staleness does to the pictures of the trained model: how far they are
from stock's of the same captions and seeds, and how many words of a caption they show.

Everything is sampled by ComfyUI's own samplers on the single-process reference: stages cannot
change a result. The cells of the default settings are sampled by a real pool as well. Legend of a
cell: patches, warm-up evaluations, steps, sampler.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..launcher.demo_nodes.captions import conditioning
from ..launcher.pictures.files import ASSETS, MODEL, VAE
from ..launcher.pictures.scenes import scenes_by_chance
from .figures import Figure, Goal, Options, estimate, exactly

if TYPE_CHECKING:
    from ..launcher.comfyui.find import ComfyInstall

PATCHES, WARM_UPS, STEPS = (2, 4, 8), (1, 2, 4), (4, 8, 20, 28)
SAMPLERS = ("euler", "dpmpp_2m", "heun", "dpmpp_2m_sde")
CFG, SCHEDULER = 3.0, "simple"
SCENES_SEED, BATCH, LATENT = 777, 32, (16, 16, 16)
CLASSIFIED_SET, SET_SEED = 2048, 555
PROMPTS = 64
LEAST_PSNR, LEAST_WORDS, LOST_WORDS = 25.0, 0.9, 0.01
POOLS = {"ulysses=2": {"ulysses": 2}, "stages=2": {"ulysses": 1, "pipefusion": 2}}


@dataclass(frozen=True)
class Cell:
    """``patches`` of 1 is stock or, with a ``pool``, sequence parallelism. ``seed``: 0 but where
    stock is compared with itself.
    """

    patches: int
    warm_up: int
    steps: int
    sampler: str
    pool: str = ""
    seed: int = 0

    def __str__(self) -> str:
        method = "stock" if self.patches == 1 else f"patches={self.patches} warm-up={self.warm_up}"
        method = self.pool if self.patches == 1 and self.pool else f"{method} {self.pool}".strip()
        return f"{method} steps={self.steps} {self.sampler}" + (f" seed={self.seed}" if self.seed else "")

    @property
    def stock(self) -> Cell:
        return Cell(1, 0, self.steps, self.sampler)


AT_GOAL = Cell(4, 2, 28, "euler")
DEFAULT = Cell(3, 1, 20, "euler")  # of two stages
DEFAULTS = (replace(DEFAULT.stock, pool="ulysses=2"), DEFAULT, replace(DEFAULT, pool="stages=2"))


def cells(only: Sequence[str]) -> Iterator[Cell]:
    """Return the product, or those that have all words of ``only``, such as ``patches=4``; the ones
    that have goals first.
    """
    product = (Cell(patches, warm_up, *rest) for *rest, patches, warm_up in itertools.product(STEPS, SAMPLERS, PATCHES, WARM_UPS))
    by_sampler = sorted(product, key=lambda cell: SAMPLERS.index(cell.sampler))
    for cell in dict.fromkeys((AT_GOAL, *DEFAULTS, *by_sampler)):
        if set(only) <= set(str(cell).split()) and cell.warm_up < cell.steps:
            yield cell


class Pictures:
    """The trained model in this process, and what it has sampled; kept in ``folder`` between
    runs of the bench.
    """

    def __init__(self, prompts: int, folder: Path | None, host: ComfyInstall):
        import comfy.sd
        import comfy.utils

        self.scenes = scenes_by_chance(SCENES_SEED, prompts)
        self._folder, self._host = folder, host
        weights, metadata = comfy.utils.load_torch_file(str(ASSETS / VAE), return_metadata=True)
        self._vae = comfy.sd.VAE(sd=weights, metadata=metadata)
        self._loaded: dict[tuple[int, int, str], Any] = {}

    @cached_property
    def _weights(self) -> str:
        return hashlib.sha256((ASSETS / MODEL).read_bytes() + (ASSETS / VAE).read_bytes()).hexdigest()[:12]

    @cached_property
    def _keeper(self) -> Any:
        from ..launcher.pool.handle import PoolKeeper
        from ..launcher.pool.rank_setup import RankSetup

        return PoolKeeper(RankSetup(comfyui=self._host.comfyui, comfy_args={"cpu": True}))

    def close(self) -> None:
        if "_keeper" in self.__dict__:
            self._keeper.close()

    def of(self, cell: Cell) -> Any:
        """Sample every caption; (B, 3, S, S) in [0, 1]. Batches that lie in the folder are taken
        from there.
        """
        import torch

        return torch.cat([self._part(cell, start) for start in range(0, len(self.scenes), BATCH)]).float() / 255

    def features(self, pictures: Any) -> Any:
        """(B, 3, S, S) -> the autoencoder's latents (B, F)."""
        import torch

        with torch.inference_mode():
            return torch.cat([self._vae.encode(part.movedim(1, -1)).flatten(1).clone() for part in pictures.split(BATCH)])

    def _part(self, cell: Cell, start: int) -> Any:
        import torch

        count = min(BATCH, len(self.scenes) - start)
        name = "-".join(map(str, (self._weights, start, count, *asdict(cell).values())))
        file = self._folder / f"{name}.pt" if self._folder else None
        if file is not None and file.exists():
            return torch.load(file, weights_only=True)
        pictures = (self._sample(cell, start) * 255).round().to(torch.uint8)
        if file is not None:
            torch.save(pictures, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        return pictures

    def _sample(self, cell: Cell, start: int) -> Any:
        import comfy.sample
        import torch

        scenes = self.scenes[start : start + BATCH]
        tokens = torch.stack([conditioning(scene) for scene in scenes])
        positive, negative = ([[each, {"pooled_output": each.flatten(1)}]] for each in (tokens, torch.zeros_like(tokens)))
        seed = start + 1_000_000 * cell.seed
        noise = torch.randn(len(scenes), *LATENT, generator=torch.Generator().manual_seed(seed))
        empty = torch.zeros_like(noise)
        how = (cell.steps, CFG, cell.sampler, SCHEDULER, positive, negative, empty)
        with torch.inference_mode():
            latent = comfy.sample.sample(self._model(cell), noise, *how, disable_pbar=True, seed=seed)
            return self._vae.decode(latent).movedim(-1, 1).clamp(0, 1).clone()

    def _model(self, cell: Cell) -> Any:
        key = (cell.patches, cell.warm_up if cell.patches > 1 else 0, cell.pool)
        if key not in self._loaded:
            self._loaded[key] = self._made(cell)
        return self._loaded[key]

    def _made(self, cell: Cell) -> Any:
        import comfy.sd

        from ..launcher.pool.devices import place
        from ..parallel_runtime.client.in_process import reference
        from ..parallel_runtime.client.patchwise import Patching
        from ..parallel_runtime.client.remote_patcher import parallelize
        from ..parallel_runtime.client.remote_pool import RemotePool
        from ..parallel_runtime.layout import Layout

        model = comfy.sd.load_diffusion_model(str(ASSETS / MODEL))
        if cell.pool:
            placement = place(Layout(**POOLS[cell.pool]), "cpu", "gloo", ())
            pool = RemotePool(self._keeper.handle(placement), shares_weights=True)
            return parallelize(model, pool, 0.0, Patching(cell.patches, cell.warm_up) if cell.patches > 1 else None)
        return model if cell.patches == 1 else reference(model, cell.patches, cell.warm_up)


def bench(options: Options) -> Iterator[Figure]:
    pictures = Pictures(options.prompts or PROMPTS, options.pictures, options.host)
    try:
        yield from measured(pictures, options.only)
    finally:
        pictures.close()


def measured(pictures: Pictures, only: Sequence[str]) -> Iterator[Figure]:
    from ..launcher.pictures.classifier import accuracy
    from ..launcher.pictures.measures import psnr, ssim

    classifier = trained_classifier()
    told: dict[Cell, dict[str, float]] = {}
    for cell in cells(only):
        stock, ours = pictures.of(cell.stock), pictures.of(cell)
        decibels = [min(value, 99.0) for value in psnr(ours, stock).tolist()]
        yield Figure("quality", str(cell), "psnr", estimate(decibels, mean), "dB", Goal(at_least=LEAST_PSNR) if cell == AT_GOAL else None)
        yield Figure("quality", str(cell), "ssim", estimate(ssim(ours, stock).tolist(), mean), "")
        for each, sampled in ((cell.stock, stock), (cell, ours)):
            if each not in told:
                told[each] = accuracy(classifier, sampled, pictures.scenes)
                yield from words(each, told)


def words(cell: Cell, told: dict[Cell, dict[str, float]]) -> Iterator[Figure]:
    for name, share in told[cell].items():
        goal = None
        if name == "all" and cell == DEFAULT.stock:
            goal = Goal(at_least=LEAST_WORDS)
        elif name == "all" and cell in DEFAULTS:
            goal = Goal(at_least=told[cell.stock][name] - LOST_WORDS)
        yield Figure("quality", str(cell), f"{name} right", exactly(share), "", goal)


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
