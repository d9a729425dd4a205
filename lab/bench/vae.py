"""Measure a VAE by bands of rows: two ranks that decode one picture, or one video, beside stock's
decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .capacity import capacity, speedup
from .figures import CaseFigures, Figure, Goal, Options, Round
from .lockstep import Phase, Ranks, merge, run, timed
from .sp import efficiency, patch_tax

# A VAE by the name of its latents and its width, and latents whose decode takes 2 s or more
CASES = {"AutoencoderKL": ("Flux", 32, (1, 16, 64, 64)), "Wan 2.1": ("Wan21", 96, (1, 16, 3, 48, 4))}
SMALLEST = {"AutoencoderKL": ("Flux", 32, (1, 16, 8, 8)), "Wan 2.1": ("Wan21", 32, (1, 16, 1, 8, 4))}
EFFICIENCY, OF_CAPACITY = 0.90, 0.85  # goals


def of_capacity(rounds: Sequence[Round]) -> float:
    return speedup(rounds) / capacity(rounds)


def random_weights(model: Any) -> Any:
    """Weights that keep what goes through at one size."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() > 1 and not name.endswith("gamma"):
                one.normal_(std=(2 / one[0].numel()) ** 0.5, generator=generator)
            else:
                one.fill_(float(not name.endswith("bias")))
    return model.eval().requires_grad_(False)


def by_bands(model: Any, latent: Any, comm: Any) -> float:
    """Seconds of this rank's part of a decoding by bands."""
    import torch

    from ...parallel_runtime.methods.vae_bands import BandsOfRows
    from ...parallel_runtime.patches import Part

    method, arguments = (
        BandsOfRows(model, comm, torch.device("cpu")),
        {"samples": latent, "unit": 1, "options": {}},
    )
    method.attach()
    try:
        method.begin(Part(1, 0))
        with torch.inference_mode():
            return timed(lambda: method.forward(model.decode, arguments, 1))
    finally:
        method.detach()


def measure(ranks: Ranks, case: str, rounds: int) -> list[Round]:
    import torch

    from ...parallel_runtime.layout import Layout
    from ..dry_run.decoding import vae_of
    from .forwards import standin

    layout = Layout(ulysses=ranks.size)
    mesh = ranks.connect(layout)
    latents, width, shape = ranks.choose(CASES, SMALLEST)[case]
    model = random_weights(vae_of(latents, width))
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(5))

    def whole() -> float:
        with torch.inference_mode():
            return timed(lambda: model.decode(latent))

    standins = [standin(layout, rank) for rank in range(ranks.size)]
    return ranks.measure(
        {
            "alone": Phase(whole, alone=True),
            "parallel": Phase(lambda: by_bands(model, latent, mesh.sequence)),
            "both": Phase(whole),
            "shards": Phase(lambda: sum(by_bands(model, latent, one) for one in standins), alone=True),
        },
        rounds,
    )


def bench(options: Options) -> Iterator[Figure]:
    for case in options.only or CASES:
        rounds = merge(run(options, 2, "vae:measure", case=case, rounds=options.rounds))
        made = CaseFigures("vae", case, rounds)
        yield made.estimated("efficiency", efficiency, "ratio", Goal(at_least=EFFICIENCY))
        yield made.estimated("speedup", speedup, "x")
        yield made.estimated("of_capacity", of_capacity, "ratio", Goal(at_least=OF_CAPACITY))
        yield made.estimated("band_tax", patch_tax, "ratio")
        yield made.estimated("capacity", capacity, "x")
