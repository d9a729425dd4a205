"""Training of the demo's model: the transformer by rectified flow, and the decoder, in turn.

Either can stop at any iteration and go on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ...launcher.errors import LaunchError
from .autoencoder import CELL, CHANNELS, Decoder, Projection, fit_projection, projection_of
from .network import Network, Width
from .picture_set import PictureSet
from .whole import whole

CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"
FITTED_ON = 512  # pictures, for the projection
WARM_UP = 200  # iterations in which the rate rises
# Share of the training after which the rate falls, and to which share of itself
DECAY_FROM, LEAST = 0.65, 0.03
AVERAGE, DECODER_AVERAGE = 0.998, 0.99
DECODER_RATE = 1e-3
DECODER_SHARE = 0.15  # of the time, while the transformer is trained
DROPPED_CAPTIONS = 0.1
TIME_SHIFT = 3.0
RECORDED = 25  # iterations
LATENT_NOISE = 0.1  # in the decoder's training: samples are not quite on the set's latents


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train; by itself, as the small model in assets was."""

    iterations: int = 2100
    seconds: float = math.inf  # of training, all sessions together; whichever ends first
    batch: int = 32
    rate: float = 6e-4
    bfloat16: bool = True
    decoder_iterations: int = 520
    shift: float = TIME_SHIFT  # of the times of training, towards noise
    threads: int = 2  # each computes a part of the batch: they meet once an iteration, not in every operation


# The larger model begins with the small one's weights
LARGER = Recipe(iterations=330, batch=8, rate=4e-4, decoder_iterations=0, shift=6.0)


class Trainee:
    """A network, its optimiser and its averaged weights."""

    def __init__(self, network: nn.Module, rate: float, average: float):
        self.network = network
        self.rate, self.decay = rate, average
        self.iteration, self.seconds = 0, 0.0
        self.names = [name for name, _ in network.named_parameters()]
        self.parameters = list(network.parameters())
        self.averaged = [parameter.detach().clone() for parameter in self.parameters]
        self.optimiser = torch.optim.AdamW(
            self.parameters, rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )

    def step(self, gradients: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
        """Follow the mean of these gradients, one of each part of the batch."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * factor
        for parameter, parts in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = laid_out_as(parameter, torch.stack(parts).mean(0))
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.iteration += 1
        keep = min(self.decay, (1 + self.iteration) / (10 + self.iteration))
        for averaged, parameter in zip(self.averaged, self.parameters, strict=True):
            averaged.lerp_(parameter.detach(), 1 - keep)

    @torch.no_grad()
    def begin_with(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take trained weights, by the network's names."""
        for name, parameter, averaged in zip(self.names, self.parameters, self.averaged, strict=True):
            parameter.copy_(weights[name])
            averaged.copy_(weights[name])

    def averaged_weights(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.averaged, strict=True))

    @contextmanager
    def as_averaged(self) -> Iterator[None]:
        """Have the network compute with the averaged weights."""
        own = [parameter.data for parameter in self.parameters]
        for parameter, averaged in zip(self.parameters, self.averaged, strict=True):
            parameter.data = averaged
        try:
            yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint needs; made anew by ``restore``."""
        found = {
            f"weight.{name}": parameter.detach()
            for name, parameter in zip(self.names, self.parameters, strict=True)
        }
        found |= {f"average.{name}": tensor for name, tensor in self.averaged_weights().items()}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, tensor in self.optimiser.state.get(parameter, {}).items():
                found[f"{key}.{name}"] = tensor
        found["iteration"], found["seconds"] = (
            torch.tensor(self.iteration),
            torch.tensor(self.seconds, dtype=torch.float64),
        )
        return found

    @torch.no_grad()
    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.iteration, self.seconds = int(tensors["iteration"]), float(tensors["seconds"])
        for name, parameter, averaged in zip(self.names, self.parameters, self.averaged, strict=True):
            parameter.copy_(tensors[f"weight.{name}"])
            averaged.copy_(tensors[f"average.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {
                    key: laid_out_as(parameter, tensors[f"{key}.{name}"]) for key in ("exp_avg", "exp_avg_sq")
                }
                self.optimiser.state[parameter] = {"step": tensors[f"step.{name}"].clone(), **moments}


class Training:
    """Both trainees and the set they learn."""

    def __init__(self, pictures: PictureSet, width: Width, recipe: Recipe, seed: int = 0):
        torch.manual_seed(seed)
        self.pictures, self.recipe, self.seed = pictures, recipe, seed
        self.transformer = Trainee(Network(width), recipe.rate, AVERAGE)
        self.decoder = Trainee(channels_last(Decoder()), DECODER_RATE, DECODER_AVERAGE)
        self.projection = fit_projection(as_floats(pictures.pictures[:FITTED_ON]))
        self.generator = torch.Generator().manual_seed(seed)
        self._threads = ThreadPoolExecutor(recipe.threads, initializer=torch.set_num_threads, initargs=(1,))

    @property
    def seconds(self) -> float:
        return self.transformer.seconds + self.decoder.seconds

    @property
    def progress(self) -> float:
        """The transformer's; whichever part is larger, of its iterations or of the time."""
        return max(self.transformer.iteration / self.recipe.iterations, self.seconds / self.recipe.seconds)

    @property
    def is_done(self) -> bool:
        return self.progress >= 1 and (self.is_decoder_done or self.seconds >= self.recipe.seconds)

    @property
    def is_decoder_done(self) -> bool:
        return self.decoder.iteration >= self.recipe.decoder_iterations

    @property
    def is_decoders_turn(self) -> bool:
        return not self.is_decoder_done and (
            self.progress >= 1 or self.decoder.seconds <= DECODER_SHARE * self.seconds
        )

    def step(self) -> tuple[str, float]:
        """Train whichever is due by one batch; return its name and its loss."""
        began = time.perf_counter()
        name, trainee = (
            ("decoder", self.decoder) if self.is_decoders_turn else ("transformer", self.transformer)
        )
        losses = self._decoder_losses() if trainee is self.decoder else self._transformer_losses()
        values, gradients = zip(
            *self._threads.map(lambda loss: self._gradients(trainee, loss), losses), strict=True
        )
        trainee.step(gradients, self._rate(trainee))
        trainee.seconds += time.perf_counter() - began
        return name, sum(values) / len(values)

    def begin_with(self, model: Mapping[str, torch.Tensor], vae: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of trained files; latents stay what they were there."""
        self.transformer.begin_with(model)
        decoder = "taesd_decoder."
        self.decoder.begin_with({name.removeprefix(decoder): vae[name] for name in vae if decoder in name})
        self.projection = projection_of(vae)

    def _gradients(
        self, trainee: Trainee, loss: Callable[[], torch.Tensor]
    ) -> tuple[float, Sequence[torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bfloat16):
            value = loss()
        return value.item(), torch.autograd.grad(value, trainee.parameters)

    def _rate(self, trainee: Trainee) -> float:
        share = (
            self.progress
            if trainee is self.transformer
            else trainee.iteration / self.recipe.decoder_iterations
        )
        warm = min(1.0, (trainee.iteration + 1) / WARM_UP)
        return warm * max(LEAST, min(1.0, (1 - share) / (1 - DECAY_FROM)))

    def _transformer_losses(self) -> list[Callable[[], torch.Tensor]]:
        """Draw a batch; return a loss for each part of it, to be computed side by side."""
        count = self.recipe.batch
        chosen = torch.randint(len(self.pictures), (count,), generator=self.generator)
        latent = self.projection.encode(as_floats(self.pictures.pictures[chosen]))
        kept = torch.rand(count, 1, 1, generator=self.generator) >= DROPPED_CAPTIONS
        times = shifted(torch.randn(count, generator=self.generator).sigmoid(), self.recipe.shift)
        noise = torch.randn(latent.shape, generator=self.generator)
        noisy = latent + (noise - latent) * times.view(-1, 1, 1, 1)
        tokens = self.pictures.tokens[chosen] * kept

        def loss(part: slice) -> torch.Tensor:
            velocity = self.transformer.network(noisy[part], times[part], tokens[part])
            return functional.mse_loss(velocity.float(), (noise - latent)[part])

        return shared_out(loss, count, self.recipe.threads)

    def _decoder_losses(self, count: int = 12, side: int = 64) -> list[Callable[[], torch.Tensor]]:
        chosen = torch.randint(len(self.pictures), (count,), generator=self.generator)
        places = (self.pictures.pictures.shape[-1] - side) // CELL + 1
        top, left = (CELL * int(torch.randint(places, (), generator=self.generator)) for _ in range(2))
        pictures = as_floats(self.pictures.pictures[chosen][..., top : top + side, left : left + side])
        latent = self.projection.encode(pictures)
        strength = LATENT_NOISE * torch.rand(count, 1, 1, 1, generator=self.generator)
        latent = latent + strength * torch.randn(latent.shape, generator=self.generator)

        def loss(part: slice) -> torch.Tensor:
            decoded = self.decoder.network(latent[part].contiguous(memory_format=torch.channels_last)).float()
            return functional.l1_loss(decoded, pictures[part]) + functional.mse_loss(decoded, pictures[part])

        return shared_out(loss, count, self.recipe.threads)

    def save(self, file: Path) -> None:
        tensors = {
            f"{name}.{key}": tensor.contiguous()
            for name, trainee in self._trainees
            for key, tensor in trainee.tensors().items()
        }
        tensors |= {"projection.weight": self.projection.weight, "projection.bias": self.projection.bias}
        tensors["generator"] = self.generator.get_state()
        with whole(file) as part:
            save_file(tensors, part, {"kept": str(self.projection.kept), "seed": str(self.seed)})

    def load(self, file: Path) -> None:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
            about = stored.metadata()
        kept, seed = float(about["kept"]), int(about.get("seed", 0))
        if seed != self.seed:
            raise LaunchError(
                f"{file} was begun with seed {seed}, not {self.seed}: give that one, or another folder."
            )
        for name, trainee in self._trainees:
            trainee.restore(
                {
                    key.removeprefix(f"{name}."): tensor
                    for key, tensor in tensors.items()
                    if key.startswith(f"{name}.")
                }
            )
        self.projection = Projection(tensors["projection.weight"], tensors["projection.bias"], kept)
        self.generator.set_state(tensors["generator"])

    @property
    def _trainees(self) -> tuple[tuple[str, Trainee], ...]:
        return ("transformer", self.transformer), ("decoder", self.decoder)


def shared_out(
    loss: Callable[[slice], torch.Tensor], count: int, threads: int
) -> list[Callable[[], torch.Tensor]]:
    """Return the loss of a part of the batch for each thread, or for each picture where those are
    fewer; their mean is the loss of the whole batch, and so are their gradients.
    """
    number = min(threads, count)
    cuts = pairwise(count * index // number for index in range(number + 1))

    def weighed(part: slice) -> torch.Tensor:
        return loss(part) * ((part.stop - part.start) * number / count)

    return [partial(weighed, slice(*ends)) for ends in cuts]


def laid_out_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into the parameter's order of memory. The fused optimiser takes it for granted,
    and mixes up the weights of a convolution without an error where it is another.
    """
    return torch.empty_like(parameter, requires_grad=False).copy_(tensor)


def channels_last(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network


def as_floats(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.float() / 255


def shifted(times: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * times / (1 + (shift - 1) * times)


@torch.no_grad()
def sampled(
    network: nn.Module, tokens: torch.Tensor, side: int, seed: int, steps: int = 20, cfg: float = 3.0
) -> torch.Tensor:
    """Sample latents by Euler's method, to look at while training; the demo samples in ComfyUI."""
    count = len(tokens)
    latent = torch.randn(count, CHANNELS, side, side, generator=torch.Generator().manual_seed(seed))
    both = torch.cat((tokens, torch.zeros_like(tokens)))
    times = torch.linspace(1, 0, steps + 1)
    for now, then in pairwise(times):
        cond, uncond = network(latent.repeat(2, 1, 1, 1), now.expand(2 * count), both).float().chunk(2)
        latent = latent + (uncond + cfg * (cond - uncond)) * (then - now)
    return latent


def run(
    training: Training,
    folder: Path,
    save_every_s: float,
    should_stop: Callable[[], bool],
    saved: Callable[[Training], None] = lambda training: None,
) -> Iterator[dict[str, float]]:
    """Train until the recipe is done; yield a record of every 25 iterations of the transformer, or
    of the decoder alone, which the log gets too. A checkpoint is written every so often and at the
    end. Records of iterations after the checkpoint that the training goes on from, made before a
    crash, leave the log.
    """
    last_saved, losses = time.monotonic(), {"transformer": [], "decoder": []}
    reached = {
        f"{prefix}iteration": trainee.iteration
        for prefix, trainee in (("", training.transformer), ("decoder_", training.decoder))
    }
    kept = [
        record
        for record in read_log(folder)
        if all(record.get(name, 0) <= number for name, number in reached.items())
    ]
    with whole(folder / LOG) as part:
        part.write_text("".join(f"{json.dumps(record)}\n" for record in kept))
    with (folder / LOG).open("a") as log:
        while not training.is_done and not should_stop():
            name, loss = training.step()
            losses[name].append(loss)
            if max(map(len, losses.values())) == RECORDED:
                means = {name: sum(values) / len(values) for name, values in losses.items() if values}
                record = {
                    "iteration": training.transformer.iteration,
                    "decoder_iteration": training.decoder.iteration,
                }
                record |= {"seconds": round(training.seconds, 1), "progress": round(training.progress, 4)}
                record |= {f"{name}_loss": round(mean, 5) for name, mean in means.items()}
                print(json.dumps(record), file=log, flush=True)
                losses = {"transformer": [], "decoder": []}
                yield record
            if time.monotonic() - last_saved > save_every_s:
                training.save(folder / CHECKPOINT)
                saved(training)
                last_saved = time.monotonic()
    training.save(folder / CHECKPOINT)
    saved(training)


def read_log(folder: Path) -> list[Mapping[str, float]]:
    """Return the records of a folder's log; a line that was cut off is none."""
    file, records = folder / LOG, []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
