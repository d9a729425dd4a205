"""The trained files that ComfyUI's own loaders read, and the curve of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from ...launcher.errors import LaunchError
from .autoencoder import SCALE, SHIFT, encoder_weights
from .training import Training, read_log
from .whole import whole

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MODEL, VAE = "pipemesh_demo_model.safetensors", "pipemesh_demo_vae.safetensors"
LARGER_MODEL = "pipemesh_demo_larger_model.safetensors"
SIZE, MARGIN = (720, 360), 40


def trained_files(model: str = MODEL) -> tuple[Path, Path]:
    """Return the file of a model, the small one or the larger, and the autoencoder's. Raises
    LaunchError if one is missing.
    """
    found = ASSETS / model, ASSETS / VAE
    for file in found:
        if not file.exists():
            larger = " --larger" if file.name == LARGER_MODEL else ""
            raise LaunchError(
                f"There is no {file}: `python3 -m lab train{larger} --export lab/assets` makes it, and the"
                " repository has it."
            )
    return found


def write_files(training: Training, log: Path, folder: Path) -> list[Path]:
    """Write the averaged weights in bfloat16, and the curve of the log that lies in ``log``.

    A running ComfyUI may have mapped the files that were there before: they keep their content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, vae, curve = folder / MODEL, folder / VAE, folder / "loss.png"
    write_model(training, model)
    decoder = {
        f"taesd_decoder.{name}": tensor for name, tensor in training.decoder.averaged_weights().items()
    }
    scales = {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}
    with whole(vae) as part:
        save_file(
            {**in_bfloat16({**encoder_weights(training.projection), **decoder}), **scales},
            part,
            about(training),
        )
    draw_curve(read_log(log), "transformer_loss").save(curve)
    return [model, vae, curve]


def write_model(training: Training, file: Path) -> None:
    """Write the transformer's averaged weights in bfloat16."""
    with whole(file) as part:
        save_file(in_bfloat16(training.transformer.averaged_weights()), part, about(training))


def about(training: Training) -> dict[str, str]:
    return {
        "format": "pt",
        "iterations": str(training.transformer.iteration),
        "decoder_iterations": str(training.decoder.iteration),
    }


def in_bfloat16(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def draw_curve(records: Sequence[Mapping[str, float]], name: str) -> Image.Image:
    """Draw a loss over the iterations; the axis begins at 0."""
    points = [(record["iteration"], record[name]) for record in records if name in record]
    picture = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    if not points:
        return picture
    width, height = SIZE[0] - 2 * MARGIN, SIZE[1] - 2 * MARGIN
    last, largest = max(x for x, _ in points), max(y for _, y in points)
    for share in (0, 0.25, 0.5, 0.75, 1):
        level = MARGIN + height * (1 - share)
        draw.line([(MARGIN, level), (MARGIN + width, level)], fill="#dddddd")
        draw.text((4, level - 6), f"{largest * share:.2f}", fill="#555555")
    line = [(MARGIN + width * x / last, MARGIN + height * (1 - y / largest)) for x, y in points]
    draw.line(line, fill="#3054dc", width=2)
    draw.text((MARGIN, 10), f"{name.replace('_', ' ')} over {last:.0f} iterations", fill="black")
    return picture
