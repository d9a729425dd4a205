"""Measure what PipeFusion's staleness does to the pictures of the trained model: how far they are
from stock's of the same captions and seeds, and how many words of a caption they show.

Everything is sampled by ComfyUI's own samplers on the single-process reference: stages cannot
change a result. The cells of the default settings are sampled by a real pool as well. Legend of a
cell: patches, warm-up evaluations, steps, sampler; n of its figures: pictures.

The product takes long, so all of it has few pictures before any of it has more.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...launcher.errors import LaunchError
from ..demo_nodes.captions import conditioning
from ..pictures.autoencoder import CELL
from ..pictures.files import trained_files
from ..pictures.scenes import scenes_by_chance
from .curves import Panel, draw_panels
from .figures import CaseFigures, Figure, Goal, Options, Where, estimate, exactly

if TYPE_CHECKING:
    from PIL.Image import Image

PATCHES, WARM_UPS, STEPS = (2, 4, 8), (1, 2, 4), (4, 8, 20, 28)
SAMPLERS = ("euler", "dpmpp_2m", "heun", "dpmpp_2m_sde")
CFG, SCHEDULER = 3.0, "simple"
SCENES_SEED, LATENT = 777, (16, 16, 16)
FIRST, BATCH = (8, 32), 32  # pictures: of all cells before any has more; of a batch, once there are as many
CLASSIFIED_SET, CLASSIFIER_STEPS, SET_SEED = 2048, 400, 555
LEAST, LEAST_SET, LEAST_STEPS = ("patches=2", "warm-up=2", "steps=4", "euler"), 32, 2  # of the smallest case
PROMPTS = 64
LEAST_PSNR, LEAST_WORDS, LOST_WORDS = 25.0, 0.9, 0.01
EXACT_PSNR = 70.0  # one byte in 150 is off by one: by rounding
SAME_PSNR = 0.01  # share by which a pipeline's may differ from that of the loop in one process
DECODED = 2  # pictures at once: layers of more do not stay in a core's cache, and take twice as long
EQUAL = 99.0  # decibels that stand for infinitely many
CURVES = "psnr.png"
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

    @property
    def evaluations(self) -> int:
        return 2 * self.steps - 1 if self.sampler == "heun" else self.steps


AT_GOAL = Cell(4, 2, 28, "euler")
DEFAULT = Cell(3, 1, 20, "euler")  # of two stages
DEFAULTS = (replace(DEFAULT.stock, pool="ulysses=2"), DEFAULT, replace(DEFAULT, pool="stages=2"))
WITH_GOALS = (AT_GOAL, *DEFAULTS)


def cells(only: Sequence[str]) -> Iterator[Cell]:
    """Return the product but for what is all warm-up, or those that have all words of ``only``,
    such as ``patches=4``; the ones that have goals first.
    """
    product = (
        Cell(patches, warm_up, steps, sampler)
        for steps, sampler, patches, warm_up in itertools.product(STEPS, SAMPLERS, PATCHES, WARM_UPS)
    )
    by_sampler = sorted(product, key=lambda cell: SAMPLERS.index(cell.sampler))
    for cell in dict.fromkeys((*WITH_GOALS, *by_sampler)):
        if set(only) <= set(str(cell).split()) and cell.warm_up < cell.evaluations:
            yield cell


def rounds(only: Sequence[str], prompts: int) -> Iterator[tuple[Cell, int]]:
    """Return cells, and how many pictures each is to have then: those that have goals all at once,
    then the product few, then more.
    """
    chosen = list(cells(only))
    with_goals = [(cell, prompts) for cell in chosen if cell in WITH_GOALS]
    counts = (*(few for few in FIRST if few < prompts), prompts)
    product = [(cell, count) for count in counts for cell in chosen if cell not in DEFAULTS]
    yield from dict.fromkeys((*with_goals, *product))


def batches(count: int) -> Iterator[slice]:
    """Cut so many captions into batches. Noise is drawn for a batch at once, so a picture is the
    same one however many there are; of the last batch alone it is another.
    """
    ends = (*FIRST, *range(FIRST[-1] + BATCH, count, BATCH))
    for start, end in pairwise((0, *(end for end in ends if end < count), count)):
        yield slice(start, end)


class Pictures:
    """The trained model in this process, and what it has sampled; kept in ``folder`` between
    runs of the bench. Its files are read once: other ones may take their place meanwhile.
    """

    def __init__(self, prompts: int, folder: Path | None, where: Where):
        import comfy.sd
        from safetensors.torch import load

        self.scenes = scenes_by_chance(SCENES_SEED, prompts)
        self._folder, self._where = folder, where
        model, vae = (file.read_bytes() for file in trained_files())
        self._weights = hashlib.sha256(model + vae).hexdigest()[:12]
        self._model_weights = load(model)
        self._vae = comfy.sd.VAE(sd=load(vae))
        self._vae.first_stage_model.to(memory_format=torch.channels_last)
        self._loaded: dict[tuple[int, int, str], Any] = {}
        self._stock: dict[tuple[Cell, int, int], Any] = {}

    @cached_property
    def _keeper(self) -> Any:
        from ...pool.handle import PoolKeeper
        from .pools import cpu_setup

        return PoolKeeper(cpu_setup(self._where))

    def close(self) -> None:
        if "_keeper" in self.__dict__:
            self._keeper.close()

    def of(self, cell: Cell, count: int | None = None) -> Any:
        """Sample the first captions, or all; (B, 3, S, S) in [0, 1]. Batches that lie in the folder
        are taken from there, and stock's are kept.
        """
        parts = []
        for batch in batches(count or len(self.scenes)):
            key = (cell, batch.start, batch.stop)
            part = self._stock[key] if key in self._stock else self._part(cell, batch)
            if cell == cell.stock:
                self._stock[key] = part
            parts.append(part)
        return torch.cat(parts).float() / 255

    def features(self, pictures: Any) -> Any:
        """(B, 3, S, S) -> the autoencoder's latents (B, F)."""
        weight, bias = self._encoder
        return torch.nn.functional.conv2d(pictures, weight, bias, stride=CELL).flatten(1)

    @cached_property
    def _encoder(self) -> tuple[Any, Any]:
        """Weight (K, 3, 8, 8) and bias (K,) of the encoder, which is linear: by what it makes of
        single pixels. Its own layers take as long as the decoder.
        """
        pixels = 3 * CELL * CELL
        cells = torch.cat((torch.zeros(1, pixels), torch.eye(pixels))).view(-1, 3, CELL, CELL)
        with torch.inference_mode():
            latents = self._vae.encode(cells.movedim(1, -1))[..., 0, 0].clone()
        return (latents[1:] - latents[0]).T.reshape(-1, 3, CELL, CELL), latents[0]

    def _part(self, cell: Cell, batch: slice) -> Any:
        name = "-".join(
            map(str, (self._weights, batch.start, batch.stop - batch.start, *asdict(cell).values()))
        )
        file = self._folder / f"{name}.pt" if self._folder else None
        if file is not None and file.exists():
            return torch.load(file, weights_only=True)
        pictures = (self._sample(cell, batch) * 255).round().to(torch.uint8)
        if file is not None:
            torch.save(pictures, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        return pictures

    def _sample(self, cell: Cell, batch: slice) -> Any:
        import comfy.sample

        scenes = self.scenes[batch]
        tokens = torch.stack([conditioning(scene) for scene in scenes])
        positive, negative = (
            [[each, {"pooled_output": each.flatten(1)}]] for each in (tokens, torch.zeros_like(tokens))
        )
        seed = batch.start + 1_000_000 * cell.seed
        noise = torch.randn(len(scenes), *LATENT, generator=torch.Generator().manual_seed(seed))
        empty = torch.zeros_like(noise)
        how = (cell.steps, CFG, cell.sampler, SCHEDULER, positive, negative, empty)
        with torch.inference_mode():
            latent = comfy.sample.sample(self._model(cell), noise, *how, disable_pbar=True, seed=seed)
            pictures = torch.cat([self._vae.decode(part) for part in latent.split(DECODED)])
            return pictures.movedim(-1, 1).clamp(0, 1).clone()

    def _model(self, cell: Cell) -> Any:
        key = (cell.patches, cell.warm_up if cell.patches > 1 else 0, cell.pool)
        if key not in self._loaded:
            self._loaded[key] = self._made(cell)
        return self._loaded[key]

    def _made(self, cell: Cell) -> Any:
        import comfy.sd

        from ...parallel_runtime.client.patch_sampling import Patching
        from ...parallel_runtime.client.remote_patcher import parallelize
        from ...parallel_runtime.client.remote_pool import RemotePool
        from ...parallel_runtime.layout import Layout
        from ...pool.devices import place
        from ..in_process import reference

        model = comfy.sd.load_diffusion_model_state_dict(dict(self._model_weights))
        if cell.pool:
            placement = place(Layout(**POOLS[cell.pool]), "cpu", "gloo", ())
            pool = RemotePool(self._keeper.handle(placement))
            return parallelize(
                model, pool, 0.0, Patching(cell.patches, cell.warm_up) if cell.patches > 1 else None
            )
        return model if cell.patches == 1 else reference(model, cell.patches, cell.warm_up)


def bench(options: Options) -> Iterator[Figure]:
    only = options.only or options.choose((), LEAST)
    if not any(cells(only)):
        raise LaunchError(
            f"No cell of quality has all of the words {' '.join(options.only)}: its cells read {AT_GOAL} and"
            " the like."
        )
    pictures = Pictures(options.prompts or options.choose(PROMPTS, 2), options.pictures, options)
    try:
        of = options.choose((CLASSIFIED_SET, CLASSIFIER_STEPS), (LEAST_SET, LEAST_STEPS))
        yield from measured(pictures, only, options.pictures, partial(trained_classifier, *of))
    finally:
        pictures.close()


def measured(
    pictures: Pictures, only: Sequence[str], folder: Path | None, trained: Callable[[], Any]
) -> Iterator[Figure]:
    """Measure cell by cell. The curves of what is known so far lie in ``folder`` after each.
    ``trained`` makes the classifier.
    """
    from ..pictures.classifier import accuracy
    from ..pictures.measures import psnr, ssim

    classifier = trained()
    told: dict[tuple[Cell, int], dict[str, float]] = {}
    found: dict[tuple[Cell, int], Sequence[float]] = {}
    for cell, count in rounds(only, len(pictures.scenes)):
        case = f"{cell} n={count}"
        stock, ours = pictures.of(cell.stock, count), pictures.of(cell, count)
        decibels = found[cell, count] = [min(value, EQUAL) for value in psnr(ours, stock).tolist()]
        yield Figure("quality", case, "psnr", estimate(decibels, mean), "dB", goal_of(cell, count, found))
        if (gained := gain_of(cell, count, found)) is not None:
            yield gained
        yield Figure("quality", case, "ssim", estimate(ssim(ours, stock).tolist(), mean), "")
        for each, sampled in ((cell.stock, stock), (cell, ours)):
            if (each, count) not in told:
                told[each, count] = accuracy(classifier, sampled, pictures.scenes[:count])
                yield from words(each, count, told, has_all=count == len(pictures.scenes))
        if folder is not None:
            curves({each: mean(values) for each, values in found.items()}).save(folder / CURVES)


def goal_of(cell: Cell, count: int, found: Mapping[tuple[Cell, int], Sequence[float]]) -> Goal | None:
    loop = found.get((replace(cell, pool=""), count))
    if cell.patches == 1:
        return Goal(at_least=EXACT_PSNR)
    if cell.pool and loop is not None:
        return Goal.within(SAME_PSNR, mean(loop))
    return Goal(at_least=LEAST_PSNR) if cell == AT_GOAL else None


def gain_of(cell: Cell, count: int, found: Mapping[tuple[Cell, int], Sequence[float]]) -> Figure | None:
    """Return what the longest warm-up gains over the shortest, picture by picture, once both are
    known.
    """
    shortest = found.get((replace(cell, warm_up=WARM_UPS[0]), count))
    if cell.warm_up != WARM_UPS[-1] or cell.pool or shortest is None:
        return None
    gained = [late - early for late, early in zip(found[cell, count], shortest, strict=True)]
    made = CaseFigures("quality", f"{cell} n={count}", gained)
    return made.estimated(f"psnr over warm-up={WARM_UPS[0]}", mean, "dB", Goal(at_least=0.0))


def words(
    cell: Cell, count: int, told: Mapping[tuple[Cell, int], Mapping[str, float]], has_all: bool
) -> Iterator[Figure]:
    """Say which share of the words is right. ``has_all``: these are as many pictures as were asked
    for, so goals count.
    """
    for name, share in told[cell, count].items():
        goal = None
        if has_all and name == "all" and cell == DEFAULT.stock:
            goal = Goal(at_least=LEAST_WORDS)
        elif has_all and name == "all" and cell in DEFAULTS:
            goal = Goal(at_least=told[cell.stock, count][name] - LOST_WORDS)
        yield Figure("quality", f"{cell} n={count}", f"{name} right", exactly(share), "", goal)


def curves(means: Mapping[tuple[Cell, int], float]) -> Image:
    """Draw PSNR over the warm-up: a row for each sampler, a column for each number of steps, a line
    for each number of patches. All points of a panel are of as many pictures.
    """
    of_product = {cell: found for cell, found in means.items() if cell[0] not in DEFAULTS}
    used, rows = set(), []
    for sampler, steps in itertools.product(SAMPLERS, STEPS):
        lines: dict[str, dict[int, float]] = {f"{patches} patches": {} for patches in PATCHES}
        here = {
            cell: decibels
            for cell, decibels in of_product.items()
            if (cell[0].sampler, cell[0].steps) == (sampler, steps)
        }
        n = most_often(count for _, count in here)
        for (cell, count), decibels in here.items():
            if count == n:
                lines[f"{cell.patches} patches"][cell.warm_up] = decibels
        used |= {n} - {0}
        rows.append(Panel(f"{sampler}, {steps} steps", lines))
    n = " or ".join(map(str, sorted(used)))
    title = f"PSNR against stock (dB) over warm-up evaluations; n = {n} pictures a cell"
    return draw_panels(
        title, [rows[start : start + len(STEPS)] for start in range(0, len(rows), len(STEPS))], WARM_UPS
    )


def most_often(counts: Iterable[int]) -> int:
    """Return the number that most of them are, the largest of several; 0 of none."""
    seen = Counter(counts)
    return max(seen, key=lambda count: (seen[count], count), default=0)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def trained_classifier(of_set: int, steps: int) -> Any:
    """Train it on so many pictures drawn anew, the same ones each time."""
    from ..pictures.classifier import train_classifier
    from ..pictures.scenes import draw

    scenes = scenes_by_chance(SET_SEED, of_set)
    drawn = [
        (draw(scenes[start : start + 256], SET_SEED + start) * 255).to(torch.uint8)
        for start in range(0, len(scenes), 256)
    ]
    return train_classifier(torch.cat(drawn), scenes, steps)
